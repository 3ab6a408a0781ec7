"""Dense attention's row of the contract table."""

from contract import Row, dense_oracle

from jaxformer.attention import ATTENTION

ROWS = {
    "dense": Row(
        kind=ATTENTION["dense"],
        variants={
            "xla": {"implementation": "xla"},
            "blockwise": {"implementation": "blockwise"},
            "blocks_of_4": {"implementation": "blockwise", "block_size": 4},
        },
        oracle=dense_oracle,
        degenerate={},
    ),
}
