"""Pipelines: schedules as data, the executor that runs them on any kind of stages, and stages of arrays of bodies."""
