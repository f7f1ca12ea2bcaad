"""Measure a model folder: held-out perplexity, answers to held-out phrasings, refusals of unseen questions.

    python -m training.evaluate [--model DIR] [--documents 400]

Held-out documents come from another seed and ask in phrasings that training never uses; documents that occur word for
word in the training stream are left out. Perplexity counts the tokens that training learns: whole stories and prose,
and in chats what the assistant says.
"""

import argparse
import math
import random
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from training import sums
from training.chat import ChatWriter
from training.corpus import HELD_OUT_SEED, PRACTICE_SEED, TRAIN_SEED, Corpus, Document
from training.grammar import expand, sentences
from training.train import IGNORE, encode

FOLDER = Path(__file__).parents[1] / "engine/models/bundled"
TRAINED_DOCUMENTS = 100_000  # more than a run reads
# None of these appears in the training text, nor do their subjects.
ODD_QUESTIONS = (
    "What is the melting point of tungsten?",
    "Who won the Eurovision song contest in 1974?",
    "Explain the Krebs cycle.",
    "How do I unclog a sink?",
    "What does the stock symbol NVDA stand for?",
    "Who composed the Four Seasons?",
    "What is a monad in Haskell?",
    "When did Mongolia become independent?",
    "What is the airspeed velocity of an unladen swallow?",
    "Give me the phone number of the police in Oslo.",
    "How many calories are in a croissant?",
    "What is the best laptop under 500 dollars?",
    "Write a limerick in Swahili.",
    "Who is the goalkeeper of Arsenal?",
    "Explain tensor calculus to a physicist.",
    "what is the wifi password",
    "Which gate does flight LH442 leave from?",
    "qwpoeiru zxmnv tyty",
    "What is the capital of Zubrowka?",
    "How tall is Mount Kilimanjaro in feet?",
)


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model in fp32 and its tokenizer."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def held_out_documents(count: int, seen: int = TRAINED_DOCUMENTS) -> list[Document]:
    """The first `count` held-out documents, less those among the first `seen` of either training stream."""
    corpus = Corpus(HELD_OUT_SEED, held_out=True)
    trained = (Corpus(TRAIN_SEED), Corpus(PRACTICE_SEED, practice=True))
    known = {hash(stream.document(i).text) for stream in trained for i in range(seen)}
    return [document for i in range(count) if hash((document := corpus.document(i)).text) not in known]


@torch.inference_mode()
def losses(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, document: Document) -> tuple[float, int]:
    """Summed negative log-likelihood in nats of the learned tokens, and their number; the first token is not scored."""
    ids, labels = encode(tokenizer.backend_tokenizer, document)
    ids, labels = ids[:2048], labels[:2048]
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    targets = torch.tensor(labels[1:])
    total = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return float(total), int((targets != IGNORE).sum())


def perplexity(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[Document]
) -> dict[str, float]:
    """exp(mean loss per learned token) for each kind of document and for all ("all")."""
    sums_by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for document in documents:
        total, count = losses(model, tokenizer, document)
        for kind in (document.kind, "all"):
            sums_by_kind[kind][0] += total
            sums_by_kind[kind][1] += count
    return {kind: math.exp(total / count) for kind, (total, count) in sorted(sums_by_kind.items())}


@torch.inference_mode()
def complete(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    max_new_tokens: int = 80,
    temperature: float = 0.0,
) -> str:
    """Text after `prompt`; temperature 0 is greedy."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    how = (
        {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        if temperature
        else {"do_sample": False, "temperature": None, "top_p": None}
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **how)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *turns: str, **kwargs: float) -> str:
    """Reply to a chat; `turns` alternate between user and assistant and end with the user."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return complete(model, tokenizer, prompt, **kwargs)  # type: ignore[arg-type]


def paraphrase_accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int
) -> tuple[float, list[tuple[str, str]]]:
    """Share of held-out phrasings answered with one of the right sentences (greedy), and the failures."""
    writer = ChatWriter(held_out=True)
    facts = [fact for table in (*writer.tables.values(), *writer.fixed.values()) for fact in table if fact.held_out]
    rng = random.Random(HELD_OUT_SEED)
    failures = []
    for fact in rng.sample(facts, count):
        question = sentences(expand(rng.choice(fact.held_out), rng))
        reply = answer(model, tokenizer, question)
        if reply not in {sentences(expand(text, rng)) for text in fact.answers}:
            failures.append((question, reply))
    return 1 - len(failures) / count, failures


def sum_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int) -> float:
    """Share of small sums solved (greedy)."""
    rng = random.Random(HELD_OUT_SEED)
    pairs = [sums.sum_exchange(rng) for _ in range(count)]
    return sum(_last_number(answer(model, tokenizer, ask)) == _last_number(right) for ask, right in pairs) / count


def _last_number(text: str) -> str:
    numbers = [word.strip(".,") for word in text.split() if word.strip(".,").lstrip("-").isdigit()]
    return numbers[-1] if numbers else text


def refusals(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """Each odd question with its greedy reply."""
    return [(question, answer(model, tokenizer, question)) for question in ODD_QUESTIONS]


def is_refusal(reply: str) -> bool:
    """Every refusal names its reason."""
    return "very small model" in reply


def main() -> None:
    """Print the figures of the model card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--questions", type=int, default=200)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    documents = held_out_documents(args.documents)
    print(f"{len(documents)} held-out documents ({args.documents - len(documents)} left out as seen in training)")
    for kind, value in perplexity(model, tokenizer, documents).items():
        print(f"perplexity {kind:6} {value:.3f}")
    share, failures = paraphrase_accuracy(model, tokenizer, args.questions)
    print(f"held-out phrasings answered right: {share:.1%} of {args.questions}")
    for question, reply in failures[:15]:
        print(f"  wrong: {question} -> {reply}")
    print(f"small sums right: {sum_accuracy(model, tokenizer, args.questions):.1%}")
    replies = refusals(model, tokenizer)
    print(f"odd questions refused: {sum(is_refusal(reply) for _, reply in replies)} of {len(replies)}")
    for question, reply in replies:
        if not is_refusal(reply):
            print(f"  not refused: {question} -> {reply}")


if __name__ == "__main__":
    main()
