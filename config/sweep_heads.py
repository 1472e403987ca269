"""Are more heads always better? One width, cut into 1, 2, 4 and 8: ten minutes on two cores.

python sweep.py config/sweep_heads.py
"""

dataset = "tales"  # comes with the repository

n_head = [1, 2, 4, 8]  # heads of 64, 32, 16 and 8 numbers; the parameters stay as many
seed = [1, 2, 3]  # a difference between heads counts if it is larger than that between seeds

n_layer = 2
n_embd = 64
block_size = 32
dropout = 0.0  # two passes over the text are too few to learn it by heart

batch_size = 16
max_iters = 4000
learning_rate = 3e-3  # a narrow model bears more than the usual 1e-3
min_lr = 3e-4
warmup_iters = 100

eval_interval = 400
eval_iters = 100  # batches: nearly the whole validation split, so that small differences show
