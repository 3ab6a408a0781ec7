"""Recurrent sequence to sequence with attention: the model that the Transformer grew from."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional import masked_softmax
from jaxformer.layers import RecurrentLayer, hidden_of, make_cell, where_real
from jaxformer.models.block import BlockAux
from jaxformer.models.recurrent_settings import RecurrentConfig
from jaxformer.models.transformer import TransformerOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RecurrentCache:
    """What decoding carries from one call to the next.

    Attributes:
      states: of each decoder layer.
      memory: the encoder's states [B, S, hidden_dim], and what the scores compare them by.
      memory_mask: bool [B, S], True = the source token exists.
    """

    states: Any
    memory: tuple[Array, Array]
    memory_mask: Array


class RecurrentSeq2Seq(nn.Module):
    """Encoder and decoder of GRU or LSTM cells, with attention over the encoder's states.

    Bahdanau, Cho, Bengio 2015, arXiv:1409.0473; Luong, Pham, Manning 2015, arXiv:1508.04025. The decoder's first state
    is tanh of a projection of the encoder's last ones, layer by layer. The output is tanh of a projection of state and
    context (Luong's equation 5), and logits from that. Deviations: no maxout in the output, no input feeding.

    Generates and is trained like an encoder-decoder ``Transformer``: the same call, the same ``start``.

    Args:
      config: sizes and wiring.
    """

    config: RecurrentConfig

    def setup(self) -> None:
        """Declare the parts that the attention needs."""
        config = self.config
        types: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.parameter_dtype}
        width = config.hidden_dim // 2 if config.bidirectional else config.hidden_dim
        embed: dict[str, Any] = {**types, "embedding_init": nn.initializers.normal(config.init_stddev)}
        self.token_embedding = nn.Embed(config.vocab_size, config.embed_dim, **embed)
        if not config.share_embeddings:
            size = config.source_vocab_size or config.vocab_size
            self.source_embedding = nn.Embed(size, config.embed_dim, **embed)
        ways = (False, True) if config.bidirectional else (False,)
        self.encoder = [
            [RecurrentLayer(config.cell, width, reverse, **types) for reverse in ways] for _ in range(config.num_layers)
        ]
        parts = 2 if config.cell == "lstm" else 1
        self.bridge = [[nn.Dense(config.hidden_dim, **types) for _ in range(parts)] for _ in range(config.num_layers)]
        self.decoder = [make_cell(config.cell, config.hidden_dim, **types) for _ in range(config.num_layers)]
        if config.attention == "additive":
            size = config.attention_dim or config.hidden_dim
            self.query_projection = nn.Dense(size, use_bias=False, **types)
            self.key_projection = nn.Dense(size, use_bias=False, **types)
            self.score_vector = nn.Dense(1, use_bias=False, **types)
        elif config.attention == "general":
            self.key_projection = nn.Dense(config.hidden_dim, use_bias=False, **types)
        self.readout = nn.Dense(config.hidden_dim, **types)
        self.output_head = nn.Dense(config.vocab_size, **types)
        self.dropout = nn.Dropout(config.dropout_rate)

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        *,
        source: Int[Array, "B S"] | None = None,
        source_mask: Bool[Array, "B S"] | None = None,
        positions: Int[Array, "B L"] | None = None,
        key_mask: Bool[Array, "B L"] | None = None,
        cache: RecurrentCache | None = None,
        select: Int[Array, "B K"] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> TransformerOutput:
        """Logits of every token, each given the tokens before it as they stand (teacher forcing).

        Args:
          tokens: int [B, L], the decoder's input.
          source: int [B, S]; not needed with a cache made by ``start``.
          source_mask: bool [B, S], True = the source token exists.
          positions: not read: states know where they are.
          key_mask: bool [B, L], True = the token exists; others change no state.
          cache: from ``start``; the new one is returned in ``aux.cache``.
          select: int [B, K], indices along L whose logits are wanted.
          deterministic: switches dropout off (else an rng named "dropout" is needed).
          return_weights: attention weights [B, 1, L, S] in ``aux.weights["cross_attention"]``, where there are any.

        Returns:
          ``TransformerOutput``.

        Raises:
          ValueError: neither source nor cache, or both.
        """
        if (source is None) == (cache is None):
            raise ValueError("RecurrentSeq2Seq needs source, or a cache made by start, and not both")
        begun = self._begin(source, source_mask, deterministic) if cache is None else cache
        embedded = self.dropout(self.token_embedding(tokens), deterministic=deterministic)
        real = jnp.ones(tokens.shape, bool) if key_mask is None else key_mask

        def step(self: Any, states: Any, inputs: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array, Array]]:
            embedded, real = inputs
            new, *outputs = self.step(states, embedded, begun)
            return [where_real(real, *pair) for pair in zip(new, states)], tuple(outputs)

        split: Any = {"params": False}
        scan = nn.scan(step, variable_broadcast="params", split_rngs=split, in_axes=1, out_axes=1)
        states, (hidden, context, weights) = scan(self, begun.states, (embedded, real))
        if select is not None:
            hidden, context = (jnp.take_along_axis(part, select[..., None], axis=1) for part in (hidden, context))
        logits = self.logits(hidden, context, deterministic)
        shown = {"cross_attention": weights[:, None]} if return_weights and self.config.attention != "none" else {}
        kept = None if cache is None else dataclasses.replace(begun, states=states)
        return TransformerOutput(logits, BlockAux(losses={}, state={}, cache=kept, weights=shown))

    def free_run(
        self,
        tokens: Int[Array, "B"],
        num_steps: int,
        *,
        source: Int[Array, "B S"],
        source_mask: Bool[Array, "B S"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B {num_steps} V"]:
        """Logits of ``num_steps`` tokens, each given the model's own likeliest tokens before it; with gradients.

        Call as ``model.apply(variables, tokens, num_steps, source=source, method="free_run")``.

        Args:
          tokens: int [B], the first input of each row.
          num_steps: tokens.
          source: int [B, S].
          source_mask: bool [B, S], True = the source token exists.
          deterministic: switches dropout off.

        Returns:
          float [B, num_steps, vocab_size].
        """
        begun = self._begin(source, source_mask, deterministic)

        def step(self: Any, carry: tuple[Any, Array], _: None) -> tuple[Any, Array]:
            states, tokens = carry
            embedded = self.dropout(self.token_embedding(tokens), deterministic=deterministic)
            states, hidden, context, _ = self.step(states, embedded, begun)
            logits = self.logits(hidden, context, deterministic)
            return (states, logits.argmax(-1).astype(tokens.dtype)), logits

        split: Any = {"params": False, "dropout": True}
        scan = nn.scan(step, variable_broadcast="params", split_rngs=split, out_axes=1, length=num_steps)
        return scan(self, (begun.states, tokens), None)[1]

    def start(
        self, source: Int[Array, "B S"], max_length: int, *, source_mask: Bool[Array, "B S"] | None = None
    ) -> RecurrentCache:
        """Encode ``source`` once; the cache has room for any length.

        Call as ``model.apply(variables, source, max_length, method="start")``.
        """
        return self._begin(source, source_mask, deterministic=True)

    def step(
        self, states: list[Any], embedded: Float[Array, "B E"], begun: RecurrentCache
    ) -> tuple[list[Any], Float[Array, "B D"], Float[Array, "B C"], Float[Array, "B S"]]:
        """One token further: the new states, the top layer's h, the context and its weights."""
        first = self.config.convention == "bahdanau"
        asking = hidden_of(states[-1])
        if first:
            context, weights = self._attend(asking, begun)
            x = jnp.concatenate([embedded, context], -1)
        else:
            x = embedded
        new = []
        for cell, state in zip(self.decoder, states):
            state, x = cell(state, x)
            new.append(state)
        if not first:
            context, weights = self._attend(x, begun)
        return new, x, context, weights

    def logits(self, hidden: Array, context: Array, deterministic: bool) -> Float[Array, "*rows V"]:
        """Of the next token, float32."""
        read = jnp.tanh(self.readout(jnp.concatenate([hidden, context], -1)))
        return self.output_head(self.dropout(read, deterministic=deterministic)).astype(jnp.float32)

    def _attend(self, query: Float[Array, "B D"], begun: RecurrentCache) -> tuple[Array, Array]:
        """The context, without features where there is no attention, and the weights that made it."""
        memory, keys = begun.memory
        if self.config.attention == "none":
            return query[:, :0], jnp.zeros(memory.shape[:2], query.dtype)
        if self.config.attention == "additive":
            scores = self.score_vector(jnp.tanh(self.query_projection(query)[:, None] + keys))[..., 0]
        else:
            scores = jnp.einsum("bd,bsd->bs", query, keys)
            if self.config.attention == "scaled_dot":
                scores = scores * self.config.hidden_dim**-0.5
        weights = masked_softmax(scores, begun.memory_mask)
        return jnp.einsum("bs,bsd->bd", weights, memory), weights

    def _begin(self, source: Array | None, source_mask: Array | None, deterministic: bool) -> RecurrentCache:
        assert source is not None
        mask = jnp.ones(source.shape, bool) if source_mask is None else source_mask
        embedding = self.token_embedding if self.config.share_embeddings else self.source_embedding
        x = self.dropout(embedding(source), deterministic=deterministic)
        states = []
        for ways, bridges in zip(self.encoder, self.bridge):
            last, outputs = zip(*(way(x, mask) for way in ways))
            x = jnp.concatenate(outputs, -1)
            parts = [jnp.concatenate(leaves, -1) for leaves in zip(*(jax.tree.leaves(state) for state in last))]
            made = [jnp.tanh(bridge(part)) for bridge, part in zip(bridges, parts)]
            states.append(tuple(made) if len(made) > 1 else made[0])
        keys = self.key_projection(x) if self.config.attention in ("additive", "general") else x
        return RecurrentCache(states, (x, keys), mask)


def recurrent(**fields: Any) -> RecurrentSeq2Seq:
    """Recurrent sequence to sequence with attention (Bahdanau, Luong) over a bidirectional encoder.

    Args:
      **fields: of ``RecurrentConfig``.

    Returns:
      A ``RecurrentSeq2Seq``.

    Raises:
      ValueError: fields that ``RecurrentConfig`` refuses.
    """
    return RecurrentSeq2Seq(RecurrentConfig(**fields))
