"""Checkpoints of other libraries: Hugging Face's folders of safetensors, read into models here and written back.

from jaxformer.interop import load_pretrained

model, params, tokenizer = load_pretrained("path/to/bert-base-uncased")
"""

from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import CHANGEABLE, Pretrained, load_pretrained, read_pretrained
from jaxformer.interop.record import write_record
from jaxformer.interop.resize import resize_vocabulary
from jaxformer.interop.save import save_pretrained, write_pretrained

__all__ = [
    "CHANGEABLE",
    "FAMILIES",
    "Pretrained",
    "PretrainedError",
    "load_pretrained",
    "read_pretrained",
    "resize_vocabulary",
    "save_pretrained",
    "write_pretrained",
    "write_record",
]
