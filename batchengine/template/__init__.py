"""Chat messages to one prompt text, with the model's own template, which nobody trusts.

Owns the check of chat messages, the template's child process and its limits. It refuses to run a
template in this process, and to take templates or free-form variables from a request.
"""

from __future__ import annotations

from batchengine.template.messages import KWARGS, ROLES, prepare_chat
from batchengine.template.renderer import CHATML, ChatTemplate, Limits

__all__ = ["CHATML", "KWARGS", "ROLES", "ChatTemplate", "Limits", "prepare_chat"]
