"""The driven denoising loop, its sampler, schedules and noise."""
