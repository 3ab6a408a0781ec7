"""The section `schedule` of a config: every field of every schedule, so that another name alone is a change."""

from ml_collections import ConfigDict

from jaxformer.training.config import optional


def schedule_config(
    name: str = "cosine",
    *,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    final_fraction: float = 0.0,
    of_width: bool = False,
) -> ConfigDict:
    """Fields of `make_schedule`, those below with values and all others None, which is each schedule's own.

    Args:
      name: a key of `SCHEDULES`.
      warmup_steps: steps.
      decay_steps: steps.
      final_fraction: of the highest rate.
      of_width: has the field `embed_dim`, so that `inverse_sqrt` is the Transformer paper's, and `learning_rate` there
        a factor; otherwise that is the highest rate, as of all schedules.

    Returns:
      The section.
    """
    schedule = ConfigDict()
    # constant, linear, cosine, polynomial, exponential, step, warmup_stable_decay, cosine_restarts, inverse_time,
    # inverse_sqrt (of the Transformer: embed_dim^-0.5 × min(step^-0.5, step × warmup_steps^-1.5) × learning_rate)
    schedule.name = name
    if of_width:
        schedule.embed_dim = optional(int)  # features, of inverse_sqrt; None = the model's
    schedule.warmup_steps = warmup_steps  # steps from 0 to the highest rate
    schedule.decay_steps = optional(int, decay_steps)  # steps; None = the train.steps that the run starts with
    schedule.final_fraction = final_fraction  # of the highest rate; where the schedule ends by itself
    schedule.power = optional(float)  # of polynomial; None = 2
    schedule.decay_rate = optional(float)  # of exponential (None = final_fraction over all steps), inverse_time (1)
    schedule.transition_steps = optional(int)  # steps a decay_rate; None: exponential 1, inverse_time warmup_steps
    schedule.boundaries = optional(tuple)  # of step: steps; None = half and three quarters from warm-up to decay_steps
    schedule.factors = optional(tuple)  # of step: of the rate before; None = 0.1 at each boundary
    schedule.cooldown_steps = optional(int)  # of warmup_stable_decay: steps; None = a fifth of decay_steps
    schedule.cooldown_form = optional(str)  # of warmup_stable_decay: 1-sqrt, cosine, linear; None = 1-sqrt
    schedule.cycle_steps = optional(int)  # of cosine_restarts: steps; None = three cycles end at decay_steps
    schedule.cycle_growth = optional(int)  # of cosine_restarts: length of a cycle by that before it; None = 2
    schedule.peak_decay = optional(float)  # of cosine_restarts: peak of a cycle by that before it; None = 1
    return schedule
