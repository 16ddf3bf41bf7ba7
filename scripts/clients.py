"""Checks that clients of other servers work with `ottava serve`: their ordinary calls, with their defaults, against a tiny model with random weights.
Prints the versions and one line per check; exit status 1 if one fails.

usage: clients.py OTTAVA_BINARY [CLIENT...]    by default all clients
Needs `pip install openai openai-agents anthropic langchain-openai litellm instructor "pydantic-ai-slim[openai]" llama-index-llms-openai-like llm inspect-ai`.
For the clients of npm, NPM_FOLDER is a folder with `npm install openai ai @ai-sdk/openai @anthropic-ai/sdk zod`. AIDER, LM_EVAL and GUIDELLM name the programs
of the packages aider-chat, lm_eval[api] and guidellm. Two minutes on two cores.
"""

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_server import KEY, MODEL, serving

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
ASK = "Where is the otter?"


class Depth(BaseModel):
    """How deep the otter dives."""

    meters: Literal[3, 5, 8]


class Dive(BaseModel):
    """Let the otter dive."""

    depth: Depth
    kind: Literal["short", "long"]
    again: bool = Field(description="whether it dives again")


def openai_chats(url):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": ASK}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, temperature=0, store=True, reasoning_effort="none")
    yield "chat", whole.choices[0].message.content != "" and whole.usage.total_tokens > 8
    pieces = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}, reasoning_effort="none"
    )
    pieces = list(pieces)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    yield "stream of a chat", text == whole.choices[0].message.content and pieces[-1].usage.completion_tokens == 8
    thought = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, reasoning_effort="high")
    yield "reasoning", thought.choices[0].message.content is None and thought.usage.completion_tokens_details.reasoning_tokens == 8
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Dive)
    yield "structured output", isinstance(parsed.choices[0].message.parsed, Dive)
    tools = [openai.pydantic_function_tool(Dive)]
    called = client.chat.completions.parse(model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False)
    call = called.choices[0].message.tool_calls[0]
    yield "required tool with nested models", isinstance(call.function.parsed_arguments, Dive) and called.choices[0].finish_reason == "tool_calls"
    answer = [{"role": "assistant", "tool_calls": [call.model_dump(exclude_none=True, exclude={"function": {"parsed_arguments"}})]}]
    answer.append({"role": "tool", "tool_call_id": call.id, "content": "wet"})
    after = client.chat.completions.create(model=MODEL, messages=messages + answer, tools=tools, max_completion_tokens=4)
    yield "result of a tool", after.usage.completion_tokens > 0
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    yield "stream of a tool", isinstance(final.function.parsed_arguments, Dive) and "tool_calls.function.arguments.delta" in kinds
    try:
        client.chat.completions.create(model=MODEL, messages=[], max_completion_tokens=8)
        yield "errors", False
    except openai.BadRequestError as error:
        yield "errors", error.param == "messages" and error.request_id is not None


def openai_responses(url):
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    first = client.responses.create(model=MODEL, instructions="be brief", input=ASK, max_output_tokens=16)
    yield "response", first.status in ("completed", "incomplete") and first.usage.output_tokens > 0
    after = client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=16)
    yield "previous response", after.usage.input_tokens > first.usage.input_tokens
    yield "stored response", client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    parsed = client.responses.parse(model=MODEL, input=ASK, text_format=Dive)
    yield "structured output", isinstance(parsed.output_parsed, Dive)
    tools = [openai.pydantic_function_tool(Dive)["function"] | {"type": "function"}]
    with client.responses.stream(model=MODEL, input=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    arguments = final.output[0].arguments
    yield "stream of a tool", Dive.model_validate_json(arguments) is not None and "response.function_call_arguments.delta" in kinds
    with client.responses.stream(model=MODEL, input=ASK, max_output_tokens=16, reasoning={"effort": "low"}) as stream:
        kinds = [event.type for event in stream]
    yield "stream of reasoning", "response.reasoning_text.delta" in kinds and kinds[-1] in ("response.completed", "response.incomplete")


def openai_agents(url):
    import agents
    import openai

    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY), use_for_tracing=False)
    called = []

    @agents.function_tool
    def dive(kind: Literal["short", "long"]) -> str:
        """Let the otter dive."""
        called.append(kind)
        return "wet"

    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
    # The text of a random model may not end.
    end = {"tool_use_behavior": "stop_on_first_tool", "model_settings": settings}
    agent = agents.Agent(name="keeper", instructions="be brief", model=MODEL, tools=[dive], **end)
    result = agents.Runner.run_sync(agent, ASK, max_turns=4)
    yield "agent with a tool", len(called) == 1 and result.final_output == "wet"
    structured = agents.Agent(name="keeper", model=MODEL, output_type=Dive)
    yield "agent with structured output", isinstance(agents.Runner.run_sync(structured, ASK).final_output, Dive)

    async def streamed():
        result = agents.Runner.run_streamed(structured, ASK)
        return [event.type async for event in result.stream_events()], result.final_output

    kinds, output = asyncio.run(streamed())
    yield "streamed agent", "raw_response_event" in kinds and isinstance(output, Dive)


def anthropic_messages(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": ASK}]
    options = {"model": MODEL, "max_tokens": 8, "system": "be brief", "messages": messages, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    yield "message", whole.stop_reason in ("max_tokens", "end_turn") and whole.usage.output_tokens > 0
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    yield "stream", text == whole.content[0].text and final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, system="be brief", messages=messages)
    yield "count of tokens", counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    thought = client.messages.create(
        model=MODEL, max_tokens=2048, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024}, extra_body={"max_tokens": 8}
    )
    yield "thinking", thought.content[0].type == "thinking"
    tools = [{"name": "dive", "description": "Let the otter dive.", "input_schema": Dive.model_json_schema()}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    called = client.messages.create(model=MODEL, max_tokens=256, messages=messages, tools=tools, tool_choice=choice)
    yield "tool", called.stop_reason == "tool_use" and Dive.model_validate(called.content[0].input) is not None
    result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "wet"}
    turns = messages + [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model=MODEL, max_tokens=4, messages=turns, tools=tools)
    yield "result of a tool", after.usage.output_tokens > 0
    with client.messages.stream(model=MODEL, max_tokens=256, messages=messages, tools=tools, tool_choice=choice) as stream:
        final = stream.get_final_message()
    yield "stream of a tool", Dive.model_validate(final.content[0].input) is not None
    try:
        client.messages.create(model=MODEL, max_tokens=8, messages=[])
        yield "errors", False
    except anthropic.BadRequestError as error:
        yield "errors", error.body["error"]["type"] == "invalid_request_error"


def langchain(url):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    options = {"base_url": f"{url}/v1", "api_key": KEY, "model": MODEL, "max_retries": 0}
    chat = ChatOpenAI(**options, max_tokens=8)
    yield "invoke", chat.invoke(ASK).usage_metadata["output_tokens"] > 0
    yield "stream", len(list(chat.stream(ASK))) > 1
    chat = ChatOpenAI(**options)
    yield "structured output", isinstance(chat.with_structured_output(Dive).invoke(ASK), Dive)
    bound = chat.bind_tools([Dive], tool_choice="any", parallel_tool_calls=False)
    yield "tool", Dive.model_validate(bound.invoke(ASK).tool_calls[0]["args"]) is not None
    pieces = None
    for piece in bound.stream(ASK):
        pieces = piece if pieces is None else pieces + piece
    yield "stream of a tool", Dive.model_validate(pieces.tool_calls[0]["args"]) is not None
    responses = ChatOpenAI(**options, use_responses_api=True, reasoning={"effort": "low"}, max_tokens=16)
    yield "responses with reasoning", responses.invoke(ASK).usage_metadata["output_token_details"]["reasoning"] > 0
    embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False, dimensions=8)
    yield "embeddings", len(embeddings.embed_query(ASK)) == 8


def litellm_completions(url):
    import litellm

    messages = [{"role": "user", "content": ASK}]
    options = {"model": f"openai/{MODEL}", "messages": messages, "api_base": f"{url}/v1", "api_key": KEY, "max_tokens": 8}
    yield "completion", litellm.completion(**options).usage.completion_tokens > 0
    yield "stream", len(list(litellm.completion(**options, stream=True))) > 1
    claude = litellm.completion(**options | {"model": f"anthropic/{MODEL}", "api_base": url})
    yield "messages of Anthropic", claude.usage.completion_tokens > 0
    response = litellm.responses(model=f"openai/{MODEL}", input=ASK, api_base=f"{url}/v1", api_key=KEY, max_output_tokens=16)
    yield "responses", response.usage.output_tokens > 0
    ranked = litellm.rerank(model=f"hosted_vllm/{MODEL}", query=ASK, documents=["a stone", ASK], api_base=url, api_key=KEY)
    yield "rerank", ranked.results[0]["index"] == 1


def instructor_models(url):
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=mode)
        found = client.chat.completions.create(model=MODEL, response_model=Dive, messages=[{"role": "user", "content": ASK}], max_retries=0)
        yield f"mode {mode.value}", isinstance(found, Dive)


def pydantic_ai(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model, settings = kind(MODEL, provider=provider), {"parallel_tool_calls": False, "max_tokens": 512}
        yield kind.__name__, isinstance(Agent(model, model_settings={"max_tokens": 16}).run_sync(ASK).output, str)
        structured = Agent(model, output_type=Dive, model_settings=settings).run_sync(ASK)
        yield f"{kind.__name__} with structured output", isinstance(structured.output, Dive)


def llama_index(url):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    chat = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, max_tokens=8, max_retries=0)
    yield "complete", chat.complete(ASK).raw.usage.completion_tokens > 0
    yield "stream", len(list(chat.stream_chat([ChatMessage(role="user", content=ASK)]))) > 0
    plain = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key=KEY, is_chat_model=False, max_tokens=8, max_retries=0)
    yield "completion", plain.complete(ASK).raw.usage.completion_tokens == 8


def llm_prompts(url):
    with tempfile.TemporaryDirectory() as folder:
        model = f"- model_id: tiny\n  model_name: {MODEL}\n  api_base: {url}/v1\n  api_key_name: ottava\n"
        (Path(folder) / "extra-openai-models.yaml").write_text(model)
        os.environ["LLM_USER_PATH"] = folder
        import llm

        response = llm.get_model("tiny").prompt(ASK, key=KEY, max_tokens=8)
        yield "prompt", isinstance(response.text(), str) and response.usage().output > 0
        yield "no stream", isinstance(llm.get_model("tiny").prompt(ASK, key=KEY, max_tokens=8, stream=False).text(), str)


def inspect_evaluations(url):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    os.environ |= {"OTTAVA_API_KEY": KEY, "OTTAVA_BASE_URL": f"{url}/v1"}
    task = Task(dataset=[Sample(input=ASK, target="sea")], solver=generate(), scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        [log] = eval(task, model=f"openai-api/ottava/{MODEL}", log_dir=folder, display="none", max_tokens=8)
    yield "evaluation", log.status == "success" and log.results.scores[0].metrics["accuracy"].value in (0.0, 1.0)


def aider(url):
    """The program that AIDER names: its packages exclude packages of other clients."""
    with tempfile.TemporaryDirectory() as folder:
        # A random model may repeat itself, which aider takes for a failure of the server.
        (Path(folder) / "settings.yml").write_text(f"- name: openai/{MODEL}\n  extra_params:\n    max_tokens: 16\n")
        command = [os.environ["AIDER"], "--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", KEY]
        command += ["--model-settings-file", "settings.yml", "--edit-format", "ask", "--map-tokens", "0", "--no-git", "--yes-always"]
        command += ["--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--message", ASK]
        ran = subprocess.run(command, cwd=folder, env=os.environ | {"HOME": folder}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    yield "message", ran.returncode == 0 and "okens: " in ran.stdout and "litellm." not in ran.stdout


def lm_eval(url):
    """The program that LM_EVAL names, with a task of its own: log-likelihoods of choices, and answers in chats."""
    items = [{"query": "The otter", "choices": [" swims", " flies"], "gold": 0, "answer": "sea"}] * 3
    task = "dataset_path: json\ndataset_kwargs:\n  data_files: {file}\ntest_split: train\ndoc_to_text: query\n"
    choices = task + "task: otters\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\n"
    answers = task + "task: answers\noutput_type: generate_until\ndoc_to_target: answer\ngeneration_kwargs:\n  until: []\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "items.jsonl"
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
        (Path(folder) / "otters.yaml").write_text(choices.format(file=file))
        (Path(folder) / "answers.yaml").write_text(answers.format(file=file))
        environment = os.environ | {"OPENAI_API_KEY": KEY, "HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
        for name, kind, path, more in [
            ("otters", "local-completions", "completions", f",tokenizer_backend=remote,auth_token={KEY}"),
            ("answers", "local-chat-completions", "chat/completions", ",max_gen_toks=8"),
        ]:
            command = [os.environ["LM_EVAL"], "run", "--model", kind, "--tasks", name, "--include_path", folder, "--output_path", "out"]
            command += ["--model_args", f"model={MODEL},base_url={url}/v1/{path},num_concurrent=2{more}"]
            command += ["--apply_chat_template"] if name == "answers" else []
            ran = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180)
            yield name, ran.returncode == 0 and f"|{name}" in ran.stdout


def guidellm(url):
    """The program that GUIDELLM names: it needs torch."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompts.txt").write_text(f"{ASK}\nIt swims.\n")
        command = [os.environ["GUIDELLM"], "run", "--backend", f"kind=openai_http,target={url},model={MODEL},api_key={KEY}"]
        command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2", "--data", "kind=text_file,path=prompts.txt"]
        command += ["--output", "kind=json,path=out.json", "--disable-console-interactive"]
        ran = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        yield "benchmark", ran.returncode == 0 and (Path(folder) / "out.json").exists() and "successful=2 errored=0" in ran.stderr


def npm(url):
    """The clients of npm in the folder NPM_FOLDER."""
    folder = os.environ["NPM_FOLDER"]
    script = Path(__file__).resolve().parent / "clients.mjs"
    yield "packages of npm", subprocess.run(["node", script, url, KEY, MODEL, folder]).returncode == 0


CLIENTS = {
    "openai": [openai_chats, openai_responses], "openai-agents": [openai_agents], "anthropic": [anthropic_messages], "langchain-openai": [langchain],
    "litellm": [litellm_completions], "instructor": [instructor_models], "pydantic-ai-slim": [pydantic_ai],
    "llama-index-llms-openai-like": [llama_index], "llm": [llm_prompts], "inspect-ai": [inspect_evaluations],
    "npm": [npm], "aider": [aider], "lm_eval": [lm_eval], "guidellm": [guidellm],
}
# Clients in environments of their own, and the variables that name these.
OTHERS = {"npm": "NPM_FOLDER", "aider": "AIDER", "lm_eval": "LM_EVAL", "guidellm": "GUIDELLM"}
# The packages whose programs these variables name.
PACKAGES = {"aider": "aider-chat", "lm_eval": "lm_eval", "guidellm": "guidellm"}


def version(name):
    """The version of a package in its environment, which has its program in `bin`."""
    if name not in PACKAGES:
        return "" if name in OTHERS else importlib.metadata.version(name)
    program = "import importlib.metadata; print(importlib.metadata.version(%r))" % PACKAGES[name]
    return subprocess.run([Path(os.environ[OTHERS[name]]).parent / "python", "-c", program], capture_output=True, text=True).stdout.strip()


def main(binary, names):
    failed = False
    with serving(binary) as url:
        for name in names or CLIENTS:
            if name in OTHERS and OTHERS[name] not in os.environ:
                print(f"skipped: {name}, because {OTHERS[name]} is not set")
                continue
            print(name, version(name), flush=True)
            for checks in CLIENTS[name]:
                try:
                    for what, passed in checks(url):
                        failed |= not passed
                        print(f"{'ok    ' if passed else 'FAILED'} {checks.__name__}: {what}", flush=True)
                except Exception:
                    failed = True
                    print(f"FAILED {checks.__name__}:\n{traceback.format_exc()}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
