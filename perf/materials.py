"""Texts to read and go on with, made from templates: the same for everyone, of any length, in whole blocks.

A block of `code` is a small Python class, one of `chinese` a paragraph; both are full of what repeats and what does not, as
real text is. With the vocabulary of the family's older models, of 151,643 entries, 722 blocks of code are 184,726 tokens and
1,162 Chinese ones 193,443 (seed 0); how many a server counts, it says itself.
"""

import random
import re
from collections.abc import Callable, Iterator
from itertools import islice


def _words(text: str) -> list[str]:
    return text.split()


_PIECE = re.compile(r"[^\n。]*(?:\n|。)")  # what a text is cut between: lines and Chinese sentences

_NOUNS = _words(
    "account batch buffer cache channel cursor device digest entry event filter frame graph group handle index journal "
    "kernel label layer ledger limit marker matrix message mirror module number object packet page parser path plan point "
    "policy queue range reader record region report request result round route sample schema segment session shard signal "
    "slot source stage state stream table target task tensor ticket token trace tree vector version view window worker"
)
_VERBS = _words(
    "accept add append apply balance check clear close collect combine compare convert copy count decode drop encode "
    "expand find flush join load lock mark merge move open pack pass pick place prune read refuse release replace reset "
    "resolve scan send shift skip sort split start stop store sum take trim update verify visit weigh write"
)
_ADJECTIVES = _words(
    "active bounded cold final fresh hidden idle large local next open partial pending ready shared small stale"
)

_PLACES = _words("江南 海边 山村 北方的小城 老城区 河谷 学校旁边 车站附近 图书馆 码头 果园 工厂 茶馆 雪原 渡口 市场")
_PEOPLE = _words("老师 工程师 船长 画家 医生 学生 木匠 邮差 厨师 农民 记者 修表匠 图书管理员 司机 护士 音乐家")
_THINGS = _words(
    "一本旧日记 一张地图 一台收音机 一封没有寄出的信 一把钥匙 一只木箱 一盏油灯 一架望远镜 一幅画 一块怀表 一份报纸 一袋种子"
)
_WEATHER = _words(
    "清晨下着小雨 傍晚起了大风 夜里很安静 中午阳光很好 天空布满了云 雪一直没有停 雾气慢慢散开 月亮升得很高"
)
_DEEDS = _words(
    "把所有的数字重新算了一遍 沿着河岸走了很久 向邻居打听那年夏天发生的事 把窗户关好以后才开始说话 在纸上画了一条弯弯的线 "
    "修好了那扇坏了多年的门 等到最后一班车离开 把收到的消息告诉了每一个人 决定第二天早上再去看一次 数了数剩下的钱和粮食"
)
_THOUGHTS = _words(
    "事情往往不像第一眼看到的那样简单 真正重要的东西常常没有名字 时间会把许多细节抹去 一个人记住的总比说出来的多 "
    "只要有人还在等待，路就不算走到尽头 方法对了，再慢也会到达 每一次选择都会留下痕迹 安静的时候才能听见远处的声音"
)


def _code(pick: random.Random, number: int) -> str:
    noun, other, third = pick.sample(_NOUNS, 3)
    verb, second = pick.sample(_VERBS, 2)
    adjective, limit, step = pick.choice(_ADJECTIVES), pick.randrange(2, 4096), pick.randrange(2, 64)
    name = f"{adjective.title()}{noun.title()}{other.title()}"
    return f'''class {name}:
    """Block {number}: {verb}s every {adjective} {noun} of a {other}, at most {limit} at a time."""

    def __init__(self, {other}: dict[str, int], limit: int = {limit}) -> None:
        self.{other} = {other}
        self.limit = limit
        self.last_{third} = {limit}
        self.{adjective}: list[str] = []

    def {verb}(self, {noun}: str, {third}: int = {step}) -> bool:
        """True if the {noun} was {adjective} and there was room for it."""
        if len(self.{adjective}) >= self.limit or {third} < 0:
            return False
        known = self.{other}.get({noun}, 0)
        self.{other}[{noun}] = known + {third} * {step}
        if known == 0:
            self.{adjective}.append({noun})
        return known % {step} == 0

    def {second}(self) -> int:
        """The sum over all {noun}s; what was {adjective} is forgotten."""
        total = 0
        for {noun} in self.{adjective}:
            total += self.{other}.pop({noun}, {step})
        self.{adjective}.clear()
        return min(total, self.limit)


'''


def _chinese(pick: random.Random, number: int) -> str:
    place, other = pick.sample(_PLACES, 2)
    person, friend = pick.sample(_PEOPLE, 2)
    thing, weather, year = pick.choice(_THINGS), pick.choice(_WEATHER), pick.randrange(1921, 2020)
    first, second, third = pick.sample(_DEEDS, 3)
    thought, last = pick.sample(_THOUGHTS, 2)
    return (
        f"第{number}节。{year}年，住在{place}的{person}带着{thing}来到{other}。那一天{weather}，他先{first}，"
        f"然后去找一位{friend}。{friend}听完以后没有马上回答，只是{second}。他们谈起过去的{pick.randrange(3, 60)}年，"
        f"谈起{pick.choice(_PLACES)}和那里的{pick.choice(_PEOPLE)}，也谈起{pick.choice(_THINGS)}的来历。"
        f"{person}说，{thought}。{friend}点点头，回答说，{last}。后来{pick.choice(_WEATHER)}，两个人{third}，"
        f"约好{pick.randrange(2, 29)}天以后在{place}再见面，"
        f"到那时再把{thing}的故事从头到尾讲完，一个字也不漏，连当年的天气也要说得清清楚楚。\n\n"
    )


_MATERIALS: dict[str, tuple[Callable[[random.Random, int], str], str, str]] = {
    "code": (
        _code,
        "Here is a module of a Python program.\n\n",
        "Write the next classes of this module, in the same style and with docstrings. Only code.",
    ),
    "chinese": (_chinese, "下面是一部小说的一部分。\n\n", "请用同样的风格继续写下去，一节接一节，只写正文。"),
}
MATERIALS = tuple(_MATERIALS)
PUBLISHED = {"code": (722, 186_000), "chinese": (1162, 193_000)}  # blocks, tokens that the blocks were sized for


def blocks(material: str, seed: int = 0) -> Iterator[str]:
    """Blocks of a material without end; the same seed gives the same text on every machine."""
    make, number = _MATERIALS[material][0], 0
    pick = random.Random(f"{material} {seed}")
    while True:
        number += 1
        yield make(pick, number)


def published(material: str) -> str:
    """As many blocks as published figures are of."""
    return "".join(islice(blocks(material), PUBLISHED[material][0]))


def text_of(material: str, characters: int, seed: int = 0) -> str:
    """At most `characters` characters in whole lines and sentences, but at least one of them."""
    found: list[str] = []
    length = 0
    for block in blocks(material, seed):
        for piece in _PIECE.findall(block):
            if found and length + len(piece) > characters:
                return "".join(found)
            found.append(piece)
            length += len(piece)
    raise AssertionError("blocks have no end")


def prompt(material: str, text: str, mark: str) -> str:
    """A user's message: `mark` first, so that no other prompt shares its beginning, the text, and what to do with it."""
    _, intro, task = _MATERIALS[material]
    return f"[{mark}] {intro}{text}\n{task}"
