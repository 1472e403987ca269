"""Multi-head attention at its smallest: two heads in two blocks, two passes over Shakespeare.

python prepare.py shakespeare --split position
python train.py config/shakespeare_heads.py
"""

dataset = "shakespeare"

n_layer = 2
n_head = 2  # 32 numbers a head
n_embd = 64
block_size = 32
dropout = 0.0

batch_size = 4
max_iters = 31370  # two passes, in windows that start every 16 characters
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 100
grad_clip = 1.0

eval_interval = 3137  # every fifth of a pass
eval_iters = 400
