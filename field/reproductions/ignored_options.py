"""Options that change the parameters of the PyTorch model, but are ignored by the Flax model."""

import jax
import transformers

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "num_key_value_heads": 2,
}
MARIAN = {"d_model": 24, "decoder_vocab_size": 37, "pad_token_id": 1, "decoder_start_token_id": 1}
MARIAN |= {
    f"{side}_{name}": n
    for side in ("encoder", "decoder")
    for name, n in (("layers", 1), ("ffn_dim", 40))
}
MARIAN |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
OPTIONS = {
    "BertModel": {"position_embedding_type": "relative_key"},
    "RoFormerModel": {"embedding_size": 10},
    "BigBirdModel": {"attention_type": "original_full", "use_bias": False},
    "MistralModel": {"head_dim": 10},
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "MarianMTModel": {"share_encoder_decoder_embeddings": False},
}
for name, option in OPTIONS.items():
    twin = getattr(transformers, name)
    sizes = {"vocab_size": 37, **MARIAN} if name.startswith("Marian") else SIZES
    config, plain_config = twin.config_class(**sizes, **option), twin.config_class(**sizes)
    theirs = {key: tuple(value.shape) for key, value in twin(config).named_parameters()}
    plain = {key: tuple(value.shape) for key, value in twin(plain_config).named_parameters()}
    ours = getattr(transformers, f"Flax{name}")
    counts = [
        sum(leaf.size for leaf in jax.tree.leaves(ours(made, _do_init=False).params_shape_tree))
        for made in (plain_config, config)
    ]
    print(f"{name}, {option}")
    print(
        f"  PyTorch: {len(plain)} tensors by default, {len(theirs)} with it; shapes differ:"
        f" {plain != theirs}"
    )
    print(f"  Flax: {counts[0]} numbers by default, {counts[1]} with it")
