"""FlaxBloomModel needs a power of two as the number of heads; BLOOM itself has 112."""

from transformers import BloomConfig, BloomModel, FlaxBloomModel

for heads in (2, 3):
    config = BloomConfig(vocab_size=37, hidden_size=24, n_layer=1, n_head=heads)
    print(
        f"PyTorch, {heads} heads: {sum(p.numel() for p in BloomModel(config).parameters())}"
        " parameters"
    )
    try:
        FlaxBloomModel(config)
        print(f"Flax, {heads} heads: built")
    except AttributeError as error:
        print(f"Flax, {heads} heads: {type(error).__name__}: {error}")
