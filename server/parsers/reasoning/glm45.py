"""GLM-4.5 and later, which think unless the template shows an empty thinking; Ling 3 writes as they do."""

from typing import Final

from pagoda.server.parsers.reasoning.tagged import TaggedFormat

GLM45: Final = TaggedFormat(
    turns=("<|assistant|>", "<role>ASSISTANT</role>", "<|im_start|>assistant"), calls=("<tool_call>",)
)
