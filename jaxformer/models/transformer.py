"""The Transformer: embeddings, one or two stacks and the output head, driven by one configuration."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.layers import TokenEmbedding, init_convolution_cache
from jaxformer.models.attention_choice import AttentionChoice
from jaxformer.models.block import BlockAux, BlockCache, BlockInputs, real_tokens
from jaxformer.models.config import TransformerConfig
from jaxformer.models.heads import SentenceHead, TokenHead
from jaxformer.models.position_settings import TABLES
from jaxformer.models.side import DecoderCache, Side
from jaxformer.models.stack import project_memories
from jaxformer.models.universal import project_tied_memory


class TransformerOutput(NamedTuple):
    """What a model returns.

    Attributes:
      logits: float32 [B, L, vocab_size] (or [B, K, vocab_size] of the selected positions).
      aux: auxiliary losses, metrics, maps, state, cache and attention weights of the (decoder's) stack; an encoder's
        losses, metrics, maps and weights beside them, under names that begin with ``encoder_``.
      next_sentence: float32 [B, 2] with ``config.next_sentence``, else None: logits that the second text follows the
        first (0) and that it was drawn at random (1).
    """

    logits: Array
    aux: BlockAux
    next_sentence: Array | None = None


class Transformer(nn.Module):
    """Decoder-only, encoder-only or encoder-decoder Transformer with a token head.

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762.

    Args:
      config: shape and wiring.
    """

    config: TransformerConfig

    def setup(self) -> None:
        """Declare the parts that the architecture has."""
        config = self.config
        self.token_embedding = self._table(config.vocab_size)
        if not config.share_embeddings:
            self.source_embedding = self._table(config.source_vocab_size or config.vocab_size)
        if config.architecture != "decoder":
            own = config if config.architecture == "encoder" else config.encoder_side
            self.encoder = Side(own, own.num_layers, causal=False)
        if config.architecture != "encoder":
            self.decoder = Side(config, config.num_layers, causal=True, cross=config.architecture == "encoder_decoder")
        if config.num_token_types:
            self.token_type_embedding = self._table(config.num_token_types, 1)
        # The heads' parameters stand beside the embeddings: ``output_head``, ``pooler``, ….
        self.token_head = TokenHead(config)
        nn.share_scope(self, self.token_head)
        if config.next_sentence:
            self.sentence_head = SentenceHead(config)
            nn.share_scope(self, self.sentence_head)

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        *,
        token_types: Int[Array, "B L"] | None = None,
        source: Int[Array, "B S"] | None = None,
        source_mask: Bool[Array, "B S"] | None = None,
        source_positions: Int[Array, "B S"] | None = None,
        source_segments: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B L"] | None = None,
        segments: Int[Array, "B L"] | None = None,
        key_mask: Bool[Array, "B L"] | None = None,
        cache: DecoderCache | None = None,
        select: Int[Array, "B K"] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> TransformerOutput:
        """Logits of every token.

        Args:
          tokens: int [B, L] (the decoder's input, or the encoder's where that is all there is).
          token_types: int [B, L], below ``num_token_types`` (default 0), such as which sentence of a pair.
          source: int [B, S], the encoder's input of an encoder-decoder; not needed with a cache made by ``start``.
          source_mask: bool [B, S], True = the source token exists.
          source_positions: int [B, S] (default 0, 1, …).
          source_segments: int [B, S]; packed sources, seen by their own targets only.
          positions: int [B, L] (default 0, 1, …, continuing the cache). Causality compares them.
          segments: int [B, L]; packed documents never see each other. 0 = padding.
          key_mask: bool [B, L], True = the token exists.
          cache: from ``init_cache`` or ``start``; the new one is returned in ``aux.cache``.
          select: int [B, K], indices along L whose logits are wanted.
          deterministic: switches dropout off (else an rng named "dropout" is needed).
          return_weights: attention weights in ``aux.weights``.

        Returns:
          ``TransformerOutput``.

        Raises:
          ValueError: more tokens than ``max_length`` with positions from tables, or arguments that the architecture
            does not have.
        """
        hidden, aux = self.hidden(
            tokens,
            token_types=token_types,
            source=source,
            source_mask=source_mask,
            source_positions=source_positions,
            source_segments=source_segments,
            positions=positions,
            segments=segments,
            key_mask=key_mask,
            cache=cache,
            deterministic=deterministic,
            return_weights=return_weights,
        )
        next_sentence = None
        if self.config.next_sentence:
            real = real_tokens(BlockInputs(segments=segments, key_mask=key_mask))
            next_sentence = self.sentence_head(hidden, real)
        if select is not None:
            hidden = jnp.take_along_axis(hidden, select[..., None], axis=1)
        return TransformerOutput(self.head(hidden), aux, next_sentence)

    def hidden(
        self,
        tokens: Int[Array, "B L"],
        *,
        token_types: Int[Array, "B L"] | None = None,
        source: Int[Array, "B S"] | None = None,
        source_mask: Bool[Array, "B S"] | None = None,
        source_positions: Int[Array, "B S"] | None = None,
        source_segments: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B L"] | None = None,
        segments: Int[Array, "B L"] | None = None,
        key_mask: Bool[Array, "B L"] | None = None,
        cache: DecoderCache | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
        readout: Callable[[Array, Array], dict[str, Array]] | None = None,
    ) -> tuple[Array, BlockAux]:
        """Final hidden states [B, L, embed_dim] and the stack's ``BlockAux``; arguments as for a call.

        ``readout(layer, hidden)`` is called inside the (decoder's) stack with the number of each layer, from 0, and its
        output as ``head`` takes it, through the final norm; what it returns by name comes out in ``aux.readouts`` with
        a leading layer axis.
        """
        self._check_call(tokens, source, cache, positions)
        self._check_types(tokens, token_types)
        if source_segments is not None and segments is None:
            raise ValueError("source_segments were given without segments; packed sources need packed targets")
        if source_segments is not None and not self.config.cross.packing:
            raise ValueError(f"cross_attention={self.config.cross_attention!r} can't keep packed pairs apart")
        if cache is not None and return_weights:
            raise ValueError("return_weights can't be given with a cache")
        inputs = BlockInputs(positions=positions, segments=segments, key_mask=key_mask)
        shift = self._draw_shift(tokens.shape[0], deterministic)
        x = self._embed(self.token_embedding, tokens)
        if self.config.num_token_types:
            x = x + self.token_type_embedding(jnp.zeros_like(tokens) if token_types is None else token_types)
        if self.is_initializing():
            self.future_kernels()
        options: Any = {"deterministic": deterministic, "return_weights": return_weights, "readout": readout}
        if self.config.architecture == "encoder":
            return self.encoder(x, inputs, shift=shift, **options)
        encoder_aux = None
        if source is not None:
            given = BlockInputs(positions=source_positions, segments=source_segments, key_mask=source_mask)
            memory, encoder_aux = self._encode(source, given, shift, deterministic, return_weights)
            inputs = inputs._replace(memory=memory, memory_mask=source_mask, memory_segments=source_segments)
        x, aux = self.decoder(x, inputs, shift=shift, cache=cache, **options)
        return x, aux if encoder_aux is None else _with_encoder(aux, encoder_aux)

    def pooled(
        self,
        tokens: Int[Array, "B L"],
        *,
        token_types: Int[Array, "B L"] | None = None,
        positions: Int[Array, "B L"] | None = None,
        segments: Int[Array, "B L"] | None = None,
        key_mask: Bool[Array, "B L"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B D"]:
        """The pooler's output for the first real token of each row [B, embed_dim]; arguments as for a call.

        Raises:
          ValueError: the model has no pooler.
        """
        if not self.config.next_sentence:
            raise ValueError("pooled needs next_sentence=True: without it there is no pooler")
        hidden, _ = self.hidden(
            tokens,
            token_types=token_types,
            positions=positions,
            segments=segments,
            key_mask=key_mask,
            deterministic=deterministic,
        )
        return self.sentence_head.pooled(hidden, real_tokens(BlockInputs(segments=segments, key_mask=key_mask)))

    def encode(
        self,
        source: Int[Array, "B S"],
        *,
        source_mask: Bool[Array, "B S"] | None = None,
        source_positions: Int[Array, "B S"] | None = None,
        source_segments: Int[Array, "B S"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B S D"]:
        """The encoder's output for ``source``; arguments as for a call."""
        inputs = BlockInputs(positions=source_positions, segments=source_segments, key_mask=source_mask)
        shift = self._draw_shift(source.shape[0], deterministic)
        return self._encode(source, inputs, shift, deterministic)[0]

    def _encode(
        self,
        source: Array,
        inputs: BlockInputs,
        shift: Array | None,
        deterministic: bool,
        return_weights: bool = False,
    ) -> tuple[Array, BlockAux]:
        """The encoder's output and its ``BlockAux``."""
        self._check_length("source", source)
        table = self.token_embedding if self.config.share_embeddings else self.source_embedding
        options: Any = {"deterministic": deterministic, "return_weights": return_weights}
        return self.encoder(self._embed(table, source), inputs, shift=shift, **options)

    def _draw_shift(self, batch_size: int, deterministic: bool) -> Int[Array, "B"] | None:
        """Where each row's positions begin in training, the same for source and target; None = at 0."""
        longest = self.config.random_position_start
        if deterministic or not longest:
            return None
        return jax.random.randint(self.make_rng("dropout"), (batch_size,), 0, longest + 1)

    def head(self, hidden: Float[Array, "B L D"]) -> Float[Array, "B L V"]:
        """Float32 logits [B, L, vocab_size] of hidden states."""
        return self.token_head(hidden, self.token_embedding if self.config.tie_embeddings else None)

    def head_kernel(self) -> Float[Array, "D V"]:
        """The kernel by which ``head`` multiplies, [output_dim, vocab_size padded to vocab_multiple].

        Raises:
          ValueError: the head has a transform or a bias, so that it is not a product alone.
        """
        return self.token_head.kernel(self.token_embedding if self.config.tie_embeddings else None)

    def future_kernels(self) -> list[Float[Array, "D V"]]:
        """Kernels like ``head_kernel`` of the tokens after the next, in order; generation has no use for them."""
        return self.token_head.future_kernels()

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int) -> DecoderCache:
        """An empty cache for ``max_length`` slots a row: prompt, padding and generated tokens together.

        Slots may be more than a model has positions, since padding takes slots too; positions are checked per call
        where they are known outside of jit.

        Raises:
          ValueError: the architecture or the attention cannot decode.
        """
        config = self.config
        if config.architecture == "encoder":
            raise ValueError("architecture='encoder' has no decoder, so there is no cache to decode with")
        sizes = (batch_size, max_length, config.kv_heads, config.width_of_head)
        depth = config.num_layers // len(config.attentions)

        def stacked(choice: AttentionChoice) -> Any:
            one = choice.init_cache(*sizes, dtype=config.compute_dtype)
            if config.convolution_width is not None:
                width, dtype = config.convolution_width, config.compute_dtype
                one = BlockCache(one, init_convolution_cache(batch_size, width, config.embed_dim, dtype))
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (depth, *leaf.shape)), one)

        caches = tuple(stacked(choice) for choice in config.attentions)
        layers = caches if len(caches) > 1 else caches[0]
        return DecoderCache(layers=layers, index=jnp.zeros((), jnp.int32))

    def start(
        self,
        source: Int[Array, "B S"],
        max_length: int,
        *,
        source_mask: Bool[Array, "B S"] | None = None,
    ) -> DecoderCache:
        """Encode ``source`` once and return a cache of ``max_length`` slots that holds its keys and values.

        Call as ``model.apply(variables, source, max_length, method="start")``.
        """
        memory = self.encode(source, source_mask=source_mask)
        params = self.variables["params"]["decoder"]
        if self.config.stack == "universal":
            projected = project_tied_memory(params["block"], memory, self.config)
        else:
            projected = project_memories(params, memory, self.config)
        cache = self.init_cache(source.shape[0], max_length)
        return dataclasses.replace(cache, memory=projected, memory_mask=source_mask)

    def _table(self, vocab_size: int, multiple: int | None = None) -> TokenEmbedding:
        config = self.config
        init = nn.initializers.normal(config.init_stddev)
        types = (config.compute_dtype, config.parameter_dtype)
        return TokenEmbedding(vocab_size, config.embed_dim, multiple or config.vocab_multiple, *types, init)

    def _embed(self, table: TokenEmbedding, tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        x = table(tokens)
        return x * self.config.embed_dim**0.5 if self.config.scale_embedding else x

    def _check_call(
        self, tokens: Array, source: Array | None, cache: DecoderCache | None, positions: Array | None
    ) -> None:
        architecture = self.config.architecture
        if source is not None and architecture != "encoder_decoder":
            raise ValueError(f"source was given, but architecture={architecture!r} has no separate encoder")
        if source is None and architecture == "encoder_decoder" and (cache is None or cache.memory is None):
            raise ValueError("architecture='encoder_decoder' needs source, or a cache made by start")
        if cache is not None and architecture == "encoder":
            raise ValueError("architecture='encoder' can't decode with a cache")
        self._check_length("tokens", tokens)
        if cache is not None:
            self._check_cache(tokens, cache, positions)

    def _check_types(self, tokens: Array, token_types: Array | None) -> None:
        if token_types is None:
            return
        if not self.config.num_token_types:
            raise ValueError("token_types were given, but num_token_types=0: the model has no table of them")
        if token_types.shape != tokens.shape:
            raise ValueError(f"token_types has shape {token_types.shape}, must be that of tokens, {tokens.shape}")

    def _check_length(self, name: str, tokens: Array) -> None:
        limit = self.config.max_length
        if self.config.positions in TABLES and tokens.shape[1] > limit:
            raise ValueError(f"{name} has {tokens.shape[1]} positions, more than max_length={limit}")

    def _check_cache(self, tokens: Array, cache: DecoderCache, positions: Array | None) -> None:
        """Refuse to run past learned positions, where the cache is concrete and positions go on from it."""
        if positions is not None or self.config.positions not in TABLES or isinstance(cache.index, jax.core.Tracer):
            return
        if int(cache.index) + tokens.shape[1] > self.config.max_length:
            raise ValueError(
                f"tokens has {tokens.shape[1]} positions after the {int(cache.index)} of the cache, more than "
                f"max_length={self.config.max_length}"
            )


def _with_encoder(aux: BlockAux, encoder: BlockAux) -> BlockAux:
    """The decoder's ``BlockAux`` with the encoder's losses, metrics, maps and weights."""

    def join(own: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        return {**own, **{f"encoder_{name}": value for name, value in others.items()}}

    return aux._replace(
        losses=join(aux.losses, encoder.losses),
        metrics=join(aux.metrics, encoder.metrics),
        maps=join(aux.maps, encoder.maps),
        weights=join(aux.weights, encoder.weights),
    )
