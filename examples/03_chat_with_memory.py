"""A chat of several turns: every token is read once, and what was said before is drafted from memory.

The cache of one answer is continued by the next question; a `Suffix` remembers the answers themselves.

python examples/03_chat_with_memory.py [FOLDER_OR_HUB_ID]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_specdec
from hf_specdec.demo_model import demo_model_path

name = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())
tokenizer = AutoTokenizer.from_pretrained(name)
memory = hf_specdec.Suffix(tokenizer=tokenizer)
model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(name), assistant=memory)

cache = DynamicCache(config=model.config)
chat: list[dict[str, str]] = []
ids = torch.empty(1, 0, dtype=torch.long)
for question in ("Name three colours.", "Say them again, in reverse order.", "Which of them is the sky?"):
    chat.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    whole = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    # What was generated stays token for token; only the new turn's text is appended to it.
    answered = tokenizer.decode(ids[0])
    new = tokenizer(text.removeprefix(answered), return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([ids, new], dim=1) if text.startswith(answered) else whole
    if not text.startswith(answered):
        cache = DynamicCache(config=model.config)  # the template rewrites earlier turns: read the chat anew
    already_read = cache.get_seq_length()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        **{hf_specdec.host.CACHE_NAME: cache},
    )
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    chat.append({"role": "assistant", "content": answer})
    print(f"> {question}  ({ids.shape[1] - already_read} new of {ids.shape[1]} tokens read)\n{answer}\n")
    ids = output
print(f"{memory.cached_requests} answers remembered\n{memory.stats}")
