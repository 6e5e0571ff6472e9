"""Controls of a configuration: what each stage, the credit rule and the reward are good for."""
