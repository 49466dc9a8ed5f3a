"""Chinese tasks of longbench_mini. All people and towns are invented."""

from random import Random

from harness.benchmarks.mini.text import Draft, Scene, insert_at_depth, paragraphs, weave

NUM_RETRIEVAL_PARAGRAPHS = 12
WORDS: dict[str, tuple[str, ...]] = {
    "person": tuple(
        family + given
        for family in ("沈", "陆", "乔", "穆", "温", "裴", "祁", "骆")
        for given in ("望舒", "知远", "听澜", "明川", "若溪", "怀瑾")
    ),
    "town": tuple(
        head + tail for head in ("青", "白", "临", "云", "石", "柳") for tail in ("溪镇", "桥镇", "湾镇", "坪镇")
    ),
    "river": ("芦花河", "铜铃江", "半月溪", "鹿鸣河", "枫影江"),
    "trade": ("木匠", "茶农", "船工", "钟表匠", "教师", "裁缝", "养蜂人"),
    "object": ("油灯", "算盘", "铜镜", "风筝", "怀表", "石磨", "竹笛"),
    "building": ("钟楼", "粮仓", "旧码头", "图书馆", "茶馆", "邮局"),
    "food": ("米糕", "莲子羹", "腌笋", "桂花糖", "豆腐脑"),
    "topic": ("潮汐", "养蚕", "造桥", "制陶", "星图", "灯会"),
    "weather": ("细雨", "大雾", "初雪", "暖风", "阵雨"),
    "season": ("春天", "夏天", "秋天", "冬天"),
    "number": ("三", "五", "七", "九", "十二", "二十六"),
    "year": tuple(f"{year}年" for year in range(1902, 1999, 3)),
    "amount": tuple(f"{amount}万元" for amount in range(12, 90, 7)),
}

FACTS = (
    "{person}年轻时在{town}做过{trade}，常常提着{object}走到{building}。",
    "{town}的{building}建于{year}，后来因为{weather}坍塌过一次。",
    "每年{season}，镇上的人会带着{food}去看{topic}的展览。",
    "沿着{river}走{number}里路，就能看到一座废弃的{building2}。",
    "{year2}的账本记着，修路一共花了{amount}，其中一半来自一位{trade2}。",
    "{person2}写过一本关于{topic2}的小册子，至今仍被{trade3}们传阅。",
    "老人们说，{weather2}过后，{river}边总会飘来{food2}的香味。",
    "{town2}与{town3}相距不远，但是两地的{food3}做法完全不同。",
)
REMARKS = (
    "我觉得{topic}这件事可以先放一放，等到{season}再说。",
    "{town}那边的同事已经整理了{number}份材料，大家可以看一下。",
    "上次的预算是{amount}，实际花得比这个少一些。",
    "如果遇到{weather}，{building}的活动就要改到第二天。",
    "我补充一点，{trade}们对{object}的要求其实很高。",
    "这个问题{year}就有人提过，当时没有讨论出结果。",
    "会后请{person}把记录发给大家，下次会议我们接着谈{topic2}。",
)
NEWS: dict[str, tuple[str, ...]] = {
    "教育": ("{town}小学{season}开设{topic}课程，由一位{trade}授课。", "{person}向{town}的学校捐赠了{number}箱图书。"),
    "体育": ("{town}龙舟队以{number}秒的优势获得冠军。", "{person}在{river}横渡比赛中打破了{year}的纪录。"),
    "交通": ("连接{town}和{town2}的公路通车，总投资{amount}。", "受{weather}影响，{river}渡船停航{number}小时。"),
    "气象": ("气象台预报{town}将迎来{weather}，气温下降{number}度。", "今年{season}的{weather}比{year}来得更早。"),
    "文化": ("{town}{building}举办{topic}展，展出{object}等旧物。", "{person}的竹笛音乐会在{building}举行。"),
    "农业": ("{town}的莲子丰收，收入达到{amount}。", "{trade}{person}试种的新稻种亩产提高了{number}成。"),
    "财政": ("{town}公布预算，{building}的维修费为{amount}。", "审计发现{town}有{number}笔支出没有登记。"),
    "卫生": ("{town}诊所新添{number}张病床，由{person}医生负责。", "{season}流感增多，{building}设立了临时接种点。"),
}


def multifieldqa_zh(rng: Random, num_chars: int, depth: float) -> Draft:
    """A local chronicle; one sentence says who gave what."""
    scene = Scene(rng, WORDS)
    evidence = scene.fill("{year}，{person}把祖传的{object}捐给了{town}的{building}。")
    texts = weave(paragraphs(rng, FACTS, WORDS, num_chars, separator=""), evidence, depth, separator="")
    question = scene.fill("谁把祖传的{object}捐给了{town}的{building}？")
    return Draft("\n".join(texts), question, (scene["person"] + "。",), evidence, "zh")


def dureader(rng: Random, num_chars: int, depth: float) -> Draft:
    """Numbered articles as a search engine finds them; one answers the question."""
    scene = Scene(rng, WORDS)
    answer = scene.fill("先把{food}放凉，再用{object}压平，最后在{building}里晾{number}天。")
    evidence = scene.fill("{town}的{trade}这样保存{food}：") + answer
    texts = insert_at_depth(paragraphs(rng, FACTS, WORDS, num_chars, separator="", sentences=(2, 4)), evidence, depth)
    articles = [f"文章{number}\n标题：{text[:9]}\n{text}" for number, text in enumerate(texts, start=1)]
    return Draft("\n\n".join(articles), scene.fill("{town}的{trade}怎样保存{food}"), (answer,), evidence, "zh")


def vcsum(rng: Random, num_chars: int, depth: float) -> Draft:
    """Minutes of a meeting; one speaker sums up the decisions."""
    scene = Scene(rng, WORDS)
    evidence = scene.fill("会议决定由{person}负责{topic}项目，预算{amount}，{season}之前在{town}完成。")
    turns = paragraphs(rng, REMARKS, WORDS, num_chars, separator="", sentences=(1, 3))
    spoken = insert_at_depth([f"讲者{rng.randint(1, 4)}：{turn}" for turn in turns], f"讲者1：{evidence}", depth)
    return Draft("\n".join(spoken), "", (evidence,), evidence, "zh")


def lsht(rng: Random, num_chars: int, depth: float) -> Draft:
    """News items with their class; an example of the asked class lies at `depth`."""
    classes = tuple(NEWS)
    asked = rng.choice(classes)
    others = [name for name in classes if name != asked]
    evidence = _news(rng, asked) + asked
    examples: list[str] = []
    while sum(map(len, examples)) < num_chars:
        name = rng.choice(others)
        examples.append(_news(rng, name) + name)
    context = "\n".join(insert_at_depth(examples, evidence, depth))
    return Draft(context, _news(rng, asked), (asked,), evidence, "zh", tuple(rng.sample(classes, len(classes))))


def passage_retrieval_zh(rng: Random, num_chars: int, depth: float) -> Draft:
    """Numbered paragraphs, each about another person, and the abstract of one of them."""
    people = rng.sample(WORDS["person"], NUM_RETRIEVAL_PARAGRAPHS)
    sentences = ("{person}出生于{year3}，是{town4}一位{trade4}的孩子。", *FACTS)
    num_sentences = max(2, num_chars // NUM_RETRIEVAL_PARAGRAPHS // 28)
    texts = []
    for person in people:
        scene = Scene(rng, WORDS, person=person)
        chosen = (sentences[0], *rng.sample(sentences[1:], min(num_sentences - 1, len(FACTS))))
        texts.append("".join(scene.fill(template) for template in chosen))
    gold = min(int(depth * len(texts)), len(texts) - 1)
    context = "\n\n".join(f"段落{number}：{text}" for number, text in enumerate(texts, start=1))
    abstract = f"这段文字讲述了{people[gold]}的出身以及与其有关的几件小事。"
    return Draft(context, abstract, (f"段落{gold + 1}",), texts[gold], "zh")


def _news(rng: Random, name: str) -> str:
    scene = Scene(rng, WORDS)
    headline = scene.fill(rng.choice(NEWS[name]))
    return f"新闻内容：\n{headline}{scene.fill(rng.choice(FACTS))}\n类别："
