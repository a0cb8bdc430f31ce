"""FlaxRegNetModel cannot be built with layer_type="x", the RegNetX family."""

from transformers import FlaxRegNetModel, RegNetConfig, RegNetModel

SIZES = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "groups_width": 4}
for kind in ("y", "x"):
    config = RegNetConfig(layer_type=kind, **SIZES)
    print(
        f'PyTorch, layer_type="{kind}": {sum(p.numel() for p in RegNetModel(config).parameters())}'
        " parameters"
    )
    try:
        FlaxRegNetModel(config)
        print(f'Flax, layer_type="{kind}": built')
    except TypeError as error:
        print(f'Flax, layer_type="{kind}": TypeError: {error}')
