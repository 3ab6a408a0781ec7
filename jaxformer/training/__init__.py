"""Training: objectives, schedules, optimizers, the train step, meshes, checkpoints and the loop."""
