"""Whole tasks with their own metric: float, calibrated, quantization-aware, as a file.

python -m benchmarks.tasks --directory build/tasks     # all tasks, three seeds
python -m benchmarks.tasks detection --seeds 1         # one of them

Data are drawn or synthesized from a seed, or come with scikit-learn; networks are small.
"""
