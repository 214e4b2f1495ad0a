from dovetail.testing.model import ModelSuite

SMALL = {
    "architectures": ["ExampleForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class TestModel(ModelSuite):
    name = "example"
    configs = {"plain": SMALL, "tied": {**SMALL, "tie_word_embeddings": True}}  # noqa: RUF012
