"""All requests of vLLM's tests."""

from support.vllm_requests.chat_fields import CHAT_FIELDS
from support.vllm_requests.chats import CHATS
from support.vllm_requests.completions import COMPLETIONS
from support.vllm_requests.messages import MESSAGES_AND_MEDIA
from support.vllm_requests.pooling import POOLING
from support.vllm_requests.rendering import RENDERING
from support.vllm_requests.responses import RESPONSES
from support.vllm_requests.scoring import SCORING
from support.vllm_requests.serving import SERVING
from support.vllm_requests.tools import TOOLS

CASES = (
    *COMPLETIONS,
    *CHATS,
    *CHAT_FIELDS,
    *TOOLS,
    *SERVING,
    *RENDERING,
    *POOLING,
    *SCORING,
    *RESPONSES,
    *MESSAGES_AND_MEDIA,
)
