"""The tutorial's size with what has been learned since: twenty minutes on two CPU cores.

Beside config/fairy_tales.py: what to learn with, and how; docs/experiments.md has the tries.
"""

dataset = "fairy_tales"  # fetched once, from Project Gutenberg: #2591 and #27200

n_layer = 4
n_head = 4  # 48 numbers a head
n_embd = 192
block_size = 128
dropout = 0.0  # two passes over the text: too few to learn it by heart

position = "rope"
qk_norm = True
feed_forward = "relu2"

batch_size = 16  # 2048 characters an update: many small steps rather than few large ones
max_iters = 4400
optimizer = "muon"
muon_lr = 0.03
learning_rate = 4e-3  # AdamW's, for embeddings, norms and head
min_lr = 1e-5
warmup_iters = 20
beta2 = 0.99
decayed = "matrices"  # a norm has no reason to be pulled to 0

eval_interval = 200
eval_iters = 40  # batches: 82,000 characters of each split
