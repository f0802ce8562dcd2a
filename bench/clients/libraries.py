"""The client libraries, each in a process of its own: `python libraries.py NAME URL KEY`.

Runs with the interpreter of `install.python`, which has the libraries and not this repository. Each
function asks for a call of the tool `list_files`, gives its result back, and gets a text. It prints
one line of JSON: the text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL, PROMPT, RESULT = "bench", "USETOOL: list the files in this directory.", "MARKER_7391.txt"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
DESCRIPTION = "Runs a shell command and returns its output."
FUNCTION = {"name": "list_files", "description": DESCRIPTION, "parameters": PARAMETERS}


def openai_chat(url: str, key: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    call = (first.choices[0].message.tool_calls or [])[0]
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        return stream.get_final_completion().choices[0].message.content or ""


def openai_responses(url: str, key: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    first = client.responses.create(model=MODEL, input=PROMPT, tools=tools)
    call: Any = next(item for item in first.output if item.type == "function_call")
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    with client.responses.stream(
        model=MODEL, input=result, tools=tools, previous_response_id=first.id
    ) as stream:
        return stream.get_final_response().output_text


def anthropic_messages(url: str, key: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    tool: Any = {
        "name": "list_files",
        "description": DESCRIPTION,
        "input_schema": PARAMETERS,
    }
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 256, "tools": [tool]}
    first = client.messages.create(messages=messages, **asked)
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    with client.messages.stream(messages=messages, **asked) as stream:
        return stream.get_final_text()


def litellm(url: str, key: str) -> str:
    import litellm

    asked: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": key,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    message = litellm.completion(messages=messages, **asked).choices[0].message
    call = message.tool_calls[0]
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    parts = litellm.completion(messages=messages, stream=True, **asked)
    return "".join(part.choices[0].delta.content or "" for part in parts)


def langchain(url: str, key: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def list_files(command: str) -> str:
        """Runs a shell command and returns its output."""
        return RESULT

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=key, max_retries=0)
    bound = model.bind_tools([list_files])
    messages: list[Any] = [HumanMessage(PROMPT)]
    answer = bound.invoke(messages)
    messages += [answer, ToolMessage(RESULT, tool_call_id=answer.tool_calls[0]["id"])]
    return "".join(str(part.content) for part in bound.stream(messages))


def pydantic_ai(url: str, key: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    agent = Agent(OpenAIChatModel(MODEL, provider=provider))

    @agent.tool_plain
    def list_files(command: str) -> str:
        """Runs a shell command and returns its output."""
        return RESULT

    return agent.run_sync(PROMPT).output


def openai_agents(url: str, key: str) -> str:
    import agents
    import openai

    @agents.function_tool
    def list_files(command: str) -> str:
        """Runs a shell command and returns its output."""
        return RESULT

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[list_files])
    return str(agents.Runner.run_sync(agent, PROMPT).final_output)


LIBRARIES = {
    "openai": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic_messages,
    "litellm": litellm,
    "langchain-openai": langchain,
    "pydantic-ai": pydantic_ai,
    "openai-agents": openai_agents,
}

PACKAGES = {"openai-responses": "openai", "pydantic-ai": "pydantic-ai-slim"}  # of other names

if __name__ == "__main__":
    print(json.dumps(LIBRARIES[sys.argv[1]](*sys.argv[2:])))
