"""The chat template, feature by feature, on exact strings."""

from pathlib import Path

import pytest

import duovolt.tiny

transformers = pytest.importorskip("transformers")
CHECKPOINT = Path(duovolt.tiny.__file__).parent / "checkpoint"
USER = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Zeit für <Ort>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELP = (
    "\n</tools>\n\nCall a tool like this:\n\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n"
)


@pytest.fixture(scope="module")
def render():
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    return lambda messages, **options: tokenizer.apply_chat_template(messages, tokenize=False, **options)


def called(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_thinking_is_on_by_default(render):
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render([USER], add_generation_prompt=True) == asked
    assert render([USER], add_generation_prompt=True, enable_thinking=True) == asked


def test_thinking_off_gives_an_empty_block(render):
    assert render([USER], add_generation_prompt=True, enable_thinking=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_system_and_stripping(render):
    assert render([{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "\n a  b \n"}]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na  b<|im_end|>\n"
    )


def test_earlier_answers_lose_their_thinking_the_last_keeps_it(render):
    first = {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet."}
    second = {"role": "assistant", "content": "<think>\nAgain.\n</think>\n\nHello again."}
    assert render([USER, first, USER, second]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nAgain.\n</think>\n\nHello again.<|im_end|>\n"
    )
    assert render([USER, second, USER]).count("<think>") == 0
    assert "<think>\nGreet.\n</think>\n\nHello." in render([USER, first])


def test_the_prefix_of_the_next_request_ends_at_the_last_question(render):
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet."}
    prompt = render([USER], add_generation_prompt=True)
    later = render([USER, answer, USER], add_generation_prompt=True)
    assert later.startswith(prompt.removesuffix("<think>\n")) and not later.startswith(prompt)


def test_tools_stand_in_the_system_turn(render):
    schema = (
        '{"type": "function", "function": {"name": "get_time", "description": "Zeit für <Ort>", "parameters": '
        '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}'
    )
    tail = "<|im_start|>user\nHi<|im_end|>\n"
    assert render([USER], tools=[TOOL]) == f"<|im_start|>system\n# Tools\n\n<tools>\n{schema}{HELP}{tail}"
    assert render([{"role": "system", "content": "Be brief."}, USER], tools=[TOOL, TOOL]) == (
        f"<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n{schema}\n{schema}{HELP}{tail}"
    )


def test_tool_calls_and_results(render):
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [called("get_time", city="Oslo"), called("mix", n=3, flag=True, lines="a\nb", parts=[1, "ü"])],
    }
    results = [{"role": "tool", "content": "12:00"}, {"role": "tool", "content": [{"type": "text", "text": "ok"}]}]
    assert render([USER, call, *results], add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "<tool_call>\n<function=get_time>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=mix>\n<parameter=n>\n3\n</parameter>\n<parameter=flag>\ntrue\n</parameter>\n"
        '<parameter=lines>\na\nb\n</parameter>\n<parameter=parts>\n[1, "ü"]\n</parameter>\n</function>\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response>\n<tool_response>\nok\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_words_before_a_call_and_a_call_without_arguments(render):
    call = {"role": "assistant", "content": "Wait.", "reasoning_content": "Ask.", "tool_calls": [called("now")]}
    assert render([USER, call]).endswith(
        "<think>\nAsk.\n</think>\n\nWait.\n\n<tool_call>\n<function=now>\n</function>\n</tool_call><|im_end|>\n"
    )


def test_images_and_videos(render):
    parts = [
        {"type": "text", "text": "See "},
        {"type": "image", "image": "x.png"},
        {"type": "image_url", "image_url": {"url": "u"}},
        {"type": "video", "video": "v"},
        {"type": "text", "text": " there"},
    ]
    image, video = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
    assert (
        render([{"role": "user", "content": parts}]) == f"<|im_start|>user\nSee {image}{image}{video} there<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "boss", "content": "x"}], "Unknown role: boss"),
        ([USER, {"role": "system", "content": "x"}], "first message"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "content part"),
        (
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            ],
            "mapping",
        ),
    ],
)
def test_bad_messages_are_refused_in_words(render, messages, words):
    with pytest.raises(Exception, match=words):
        render(messages)
