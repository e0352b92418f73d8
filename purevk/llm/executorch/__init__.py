"""Language models in .pte files, as ExecuTorch's `export_llm` and optimum-executorch write them."""

from purevk.llm.executorch.loading import PteDecoder, PteFile, decoder_of, load_pte
from purevk.llm.executorch.steps import StepSource

__all__ = ["PteDecoder", "PteFile", "StepSource", "decoder_of", "load_pte"]
