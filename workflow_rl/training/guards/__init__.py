"""Guards: figures that no reward is trained on and that move when a reward is hacked.

Every iteration each guard is measured on the rollouts at hand, for every stage apart
(``statistics`` says what and how). Its baseline is the mean and the standard deviation over the
*samples* of the run's first iterations (``guards.baseline_iterations``), when the weights have
hardly moved: the evaluation before training would be cleaner still, but has no noise in its steps
and other prompts, so that a rollout lies off it before anything has drifted. The drift is how many
of these standard deviations the mean of the last ``guards.window`` iterations is away from the
baseline's mean, so 2 means that the average sample is now what 1 in 40 was at the start.

The KL has no spread at the start. Its guard is √(2·KL): the root mean square distance between the
step means of the policy and of the reference, in standard deviations of the step's noise. So its
baseline has mean 0 and standard deviation 1, without a look at the run. It is measured where
``kl_weight`` is above 0 and some sample trains; otherwise it is null, and raises no alarm.

Files and metrics
-----------------
A guard is called ``kind/stage``, such as ``brightness/i2v``; the kinds are those of
:data:`workflow_rl.config.guards.GuardKind`.

``metrics.jsonl``
    ``guard/{kind}/{stage}``: mean over the samples of this iteration; null where none was finite.
    ``guard_z/{kind}/{stage}``: the drift in standard deviations, with its sign; null as long as
    there is no baseline.
``guards.json``
    Written when the baseline is complete; a guard that has no value yet is left out until then::

        {"guards": {"brightness/i2v": {"mean": 0.11, "std": 0.03, "threshold": 2.0,
                                       "quantiles": [0.07, 0.11, 0.17]}, ...},
         "baseline_iterations": 5, "window": 5}

    The band to draw is mean ± threshold · std. ``threshold`` is in standard deviations.
    ``quantiles`` are those at 0.05, 0.5 and 0.95 of the samples, none for ``kl``.
``guard_alarms.jsonl``
    One line per alarm, in order; several may be of one iteration; no file where there was none::

        {"iteration": 17, "guard": "brightness/i2v", "value": 0.21, "deviations": 3.3,
         "action": "warn"}

    ``iteration`` counts from 0, as in ``metrics.jsonl``; ``value`` is the mean of the last
    ``window`` iterations. A guard raises an alarm when it enters drift and again when it is 1.5
    times as far away as at its last alarm; it leaves drift at 0.8 of the threshold. ``action`` is
    ``warn`` or ``stop``.

Everything but what an alarm says is in the checkpoints, so that a resumed run writes the same. A
checkpoint also names the guards that stopped the run: a resumed run stops again at once, unless its
configuration now lets it go on, and says so.
"""

from workflow_rl.training.guards.alarms import Alarm, GuardError
from workflow_rl.training.guards.monitor import Guards

__all__ = ["Alarm", "GuardError", "Guards"]
