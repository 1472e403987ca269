"""The tutorial's model and schedule, on the tales of Grimm and Andersen: hours on a CPU."""

dataset = "fairy_tales"  # fetched once, from Project Gutenberg: #2591 and #27200

n_layer = 4  # deep enough to learn spelling, words and the ways of a sentence
n_head = 3  # 64 numbers a head
n_embd = 192  # 1.8 million parameters for 2.3 million characters to learn from
block_size = 128  # a sentence or two of context
dropout = 0.4  # the text is passed over eighteen times, and should not be learned by heart

batch_size = 64  # 8192 characters an update
max_iters = 10000
learning_rate = 1e-3  # AdamW's usual first try for a model this small
min_lr = 1e-5  # where the cosine ends
weight_decay = 0.03  # a second, mild guard against learning by heart

eval_interval = 200
eval_iters = 10  # batches: 82,000 characters of each split, the same ones every time
