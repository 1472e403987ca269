"""nanoGPT's example for a CPU, its size and its 1,536,000 characters, with a better recipe.

python prepare.py shakespeare --split position
python train.py config/shakespeare_cpu.py
"""

dataset = "shakespeare"

n_layer = 6  # 0.8 million parameters, as its 4 layers of 128 have
n_head = 4  # 26 numbers a head
n_embd = 104
block_size = 64
dropout = 0.0  # not one pass over the text

position = "rope"
qk_norm = True
feed_forward = "relu2"

batch_size = 6  # half of nanoGPT's, and twice its updates
max_iters = 4000
optimizer = "muon"
muon_lr = 0.02
learning_rate = 6e-3  # AdamW's, for embeddings, norms and head
min_lr = 1e-5
warmup_iters = 50
beta2 = 0.99
decayed = "matrices"

eval_interval = 500
eval_iters = 40
