"""The cost of models: their parts against formulas, whole programs, shapes of parameters and caches."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxformer.experiments.language_model import ATTENTION_ARGS

from jaxformer.analysis.count import count_matmul_operations
from jaxformer.analysis.model_cost import forward_products, model_cost
from jaxformer.analysis.model_costs.parts import find_part
from jaxformer.analysis.model_costs.phases import Inputs, abstract_variables, training_loss
from jaxformer.analysis.model_costs.program import count_by_part
from jaxformer.models import (
    HeadConfig,
    TaskModel,
    Transformer,
    TransformerConfig,
    bert,
    gpt,
    recurrent,
    reformer,
    t5,
    universal_transformer,
)

SMALL = {"num_layers": 3, "embed_dim": 20, "num_heads": 2, "mlp_dim": 28, "vocab_size": 37, "max_length": 24}
BATCH, LENGTH, SOURCE = 2, 11, 7


@functools.cache
def cost_of(name):
    return model_cost(MODELS[name], BATCH, LENGTH, source_length=SOURCE if name == "t5" else None)


MODELS = {
    "gpt": gpt(**SMALL, num_kv_heads=1, positions="rotary", activation="swiglu", remat="full", head_dim=6),
    "t5": t5(**SMALL, head_dim=6, num_encoder_layers=2),
}


def tokens(length=LENGTH):
    return jax.ShapeDtypeStruct((BATCH, length), jnp.int32)


@pytest.mark.parametrize("name", MODELS)
def test_products_of_the_forward_pass_are_those_of_the_formula_part_by_part(name):
    cost, config = cost_of(name), MODELS[name].config
    formula = forward_products(config, BATCH, LENGTH, SOURCE)
    assert {part: work.matmul for part, work in cost.phases["forward"].items() if work.matmul} == formula


def test_products_by_hand():
    # A decoder of one head 6 wide for keys and values, two for queries; 11 tokens in 2 rows, which one block holds.
    works = cost_of("gpt").phases["forward"]
    rows = 2 * 11
    assert works["attention projections"].matmul == 3 * 2 * rows * 20 * (12 + 6 + 6 + 12)
    assert works["attention"].matmul == 3 * 2 * 2 * (2 * 11 * 11 * (6 + 6))
    assert works["feed-forward"].matmul == 3 * 2 * rows * 3 * 20 * 28
    assert works["head"].matmul == 2 * rows * 20 * 37


def test_products_of_the_gradient_are_those_of_its_program_with_recomputation():
    model, cost = MODELS["gpt"], cost_of("gpt")
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)))

    def loss(variables, tokens):
        logits = model.apply(variables, tokens, deterministic=False).logits
        return jax.nn.logsumexp(logits, axis=-1).sum()

    whole = count_matmul_operations(jax.value_and_grad(loss), variables, tokens())
    assert cost.products("forward") + cost.products("backward") == whole
    # Each block once more, but not its last product, which no gradient needs, nor the head.
    last, head = 3 * 2 * BATCH * LENGTH * 28 * 20, cost.phases["forward"]["head"].matmul
    assert cost.products("backward") == 3 * cost.products("forward") - head - last


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_caches_are_those_of_the_shapes(name):
    model, cost = MODELS[name], cost_of(name)
    given = {"source": jnp.zeros((1, SOURCE), jnp.int32)} if name == "t5" else {}
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32), **given))["params"]
    assert sum(cost.parameters.values()) == sum(leaf.size for leaf in jax.tree.leaves(params)) == cost.active_parameters
    assert sum(cost.parameter_bytes.values()) == 4 * cost.active_parameters
    if name == "t5":
        # Keys and values of two heads 6 wide in 3 layers: 11 slots with position, segment and mask, and the source's.
        own = 3 * (2 * 2 * 11 * 2 * 6 * 4 + 2 * 11 * (4 + 4 + 1) + 4)
        assert cost.cache_bytes == own + 3 * 2 * 2 * 7 * 2 * 6 * 4 + 4
    else:
        cache = jax.eval_shape(lambda: jax.tree.leaves(model.init_cache(BATCH, LENGTH)))
        assert cost.cache_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in cache)


def test_phases_of_generation():
    cost, config = cost_of("gpt"), MODELS["gpt"].config
    forward, prefill, decode = (cost.phases[name] for name in ("forward", "prefill", "decode"))
    for part in ("attention projections", "feed-forward"):
        assert prefill[part].matmul == forward[part].matmul == LENGTH * decode[part].matmul
    # One row of logits each; a decoded token reads every slot.
    assert prefill["head"].matmul == decode["head"].matmul == 2 * BATCH * config.embed_dim * config.vocab_size
    assert decode["attention"].matmul == 3 * 2 * BATCH * 2 * LENGTH * (6 + 6)
    assert decode["attention"].moved_bytes > cost.cache_bytes
    assert decode["feed-forward"].moved_bytes > 4 * 3 * 3 * 20 * 28
    assert cost.num_tokens == {"forward": 22, "backward": 22, "prefill": 22, "decode": 2}


def test_an_encoder_says_why_it_does_not_generate():
    cost = model_cost(bert(**SMALL, num_token_types=0), BATCH, LENGTH)
    assert list(cost.phases) == ["forward", "backward"]
    assert cost.cache_bytes is None
    assert "encoder" in cost.no_generation


def test_recomputation_keeps_fewer_activations():
    kept = cost_of("gpt").activation_bytes
    all_kept = model_cost(gpt(**SMALL, num_kv_heads=1, positions="rotary", activation="swiglu", head_dim=6), 2, 11)
    assert sum(kept.values()) < 0.5 * sum(all_kept.activation_bytes.values())
    assert "feed-forward" not in kept
    # The hidden layer and its gate, kept once in each of three layers.
    assert all_kept.activation_bytes["feed-forward"] >= 3 * 2 * (2 * 11 * 28 * 4)


@pytest.mark.slow
def test_activations_of_a_reversible_stack_do_not_grow_with_depth():
    sizes = {"embed_dim": 20, "num_heads": 2, "vocab_size": 37, "max_length": 24, "axial_dims": (8, 12)}
    shallow, deep = (model_cost(reformer(**sizes, num_layers=depth), 2, 11).activation_bytes for depth in (1, 5))
    assert deep == shallow


@pytest.mark.slow
def test_experts_that_a_token_does_not_choose_are_not_active():
    config = TransformerConfig(**SMALL, num_experts=5, expert_capacity_factor=1.0, norm="rms", use_bias=False)
    cost = model_cost(config, BATCH, LENGTH)
    assert sum(cost.parameters.values()) - cost.active_parameters == 3 * 4 * 2 * 20 * 28
    formula = forward_products(config, BATCH, LENGTH)
    assert {part: work.matmul for part, work in cost.phases["forward"].items() if work.matmul} == formula


@pytest.mark.slow
def test_chunks_of_the_loss_need_less_memory_for_the_same_products():
    model = gpt(**{**SMALL, "vocab_size": 501})
    whole, chunked = (model_cost(model, BATCH, LENGTH, loss_chunk_size=size) for size in (None, 4))
    assert chunked.activation_bytes.get("head", 0) < 0.5 * whole.activation_bytes["head"]
    # 22 tokens make 6 chunks of 4.
    assert chunked.phases["forward"]["head"].matmul == 24 * whole.phases["forward"]["head"].matmul // 22


@pytest.mark.slow
def test_other_models_have_parts_too():
    task = TaskModel(bert(**SMALL, num_token_types=0).config, HeadConfig(task="tagging", num_classes=5))
    assert model_cost(task, BATCH, LENGTH).phases["forward"]["head"].matmul == 2 * BATCH * LENGTH * 20 * 5
    seq2seq = model_cost(recurrent(vocab_size=37, hidden_dim=12, embed_dim=10), BATCH, 5)
    assert {"embedding", "attention", "recurrent cells", "head"} <= set(seq2seq.parameters)
    assert seq2seq.phases["decode"]["attention"].moved_bytes > 0


@pytest.mark.slow
def test_the_compilers_memory_is_given_where_it_is_asked_for():
    model = Transformer(TransformerConfig(**{**SMALL, "num_layers": 1}))
    cost = model_cost(model, BATCH, LENGTH, compiled=True)
    assert set(cost.temporary_bytes) == {"training", "prefill", "decode"}
    assert cost.temporary_bytes["training"] > cost.temporary_bytes["decode"] > 0
    assert cost_of("gpt").temporary_bytes is None


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("decoder/layers/mlp_norm/scale", "norms"),
        ("decoder/layers/attention/query/kernel", "attention projections"),
        ("/transpose(jvp(Transformer))/decoder/jvp(B.attend)/attention/attention._attend/vmap(vmap())", "attention"),
        ("/jvp(Transformer)/Transformer.head/token_head/token_embedding.attend/...d,vd->...v", "head"),
        ("/Transformer.hidden/Transformer._embed/token_embedding", "embedding"),
        ("/Transformer.hidden/decoder/stack", "residual stream"),
    ],
)
def test_names_tell_the_part(path, part):
    assert find_part(path) == part


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 11, None), "batch_size is 0; it must be an integer of at least 1"),
        ((2, -3, None), "length is -3; it must be"),
        ((2, 11, 3), "source_length is 3; it must be None"),
        ((2, 25, None), "25 positions, more than max_length=24"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, message):
    batch_size, length, source_length = sizes
    with pytest.raises(ValueError, match=message):
        model_cost(gpt(**SMALL), batch_size, length, source_length=source_length)


def forward_products_of_trace(model, length):
    inputs = Inputs(BATCH, length, None)
    loss, arguments = training_loss(model, abstract_variables(model, inputs), inputs, None)
    heads = model.config.num_heads * model.config.width_of_head
    matrices = frozenset({(heads, model.config.embed_dim), (model.config.embed_dim, heads)})
    works = count_by_part(loss, *arguments, matrices=matrices)
    return {part: work.matmul for part, work in works.items() if work.matmul}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION_ARGS)
def test_every_causal_attention_of_a_model_costs_what_its_formula_says(name):
    sizes = {**SMALL, "num_layers": 2, "max_length": 64, "head_dim": 6}
    model = gpt(**sizes, attention=name, attention_args=ATTENTION_ARGS[name], positions="none")
    if name in ("longformer", "routing", "sinkhorn"):
        with pytest.raises(ValueError, match="makes arrays of its own by products that no formula holds"):
            forward_products(model.config, BATCH, 64)
    else:
        assert forward_products_of_trace(model, 64) == forward_products(model.config, BATCH, 64)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"halting": "act", "early_exit": True}, {"convolution_width": 3}])
def test_universal_stacks_are_counted_by_steps(fields):
    sizes = {name: value for name, value in SMALL.items() if name != "num_layers"}
    once, thrice = (
        model_cost(universal_transformer(**sizes, num_layers=steps, architecture="decoder", **fields), BATCH, LENGTH)
        for steps in (1, 3)
    )
    for phase in ("forward", "decode"):
        for part in ("attention", "attention projections", "feed-forward"):
            assert thrice.phases[phase][part].matmul == 3 * once.phases[phase][part].matmul
    assert thrice.parameters == once.parameters
