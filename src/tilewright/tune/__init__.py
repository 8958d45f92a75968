"""Which config: measured on the GPU at hand, stored, looked up by `launch.best_plan`. Never inside a call of an op."""
