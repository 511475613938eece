"""Writes tokenizer.json: texts and the ids that tiktoken gives them. Run: python make_tokenizer_golden.py DIGITS_TOKENIZER_FOLDER
(needs tiktoken). Three vocabularies: that of the digits; one in which every piece of the split is a token, so that ids show where
the text was split; and one of random merges over three letters, so that ids show the order of merging."""
import base64, json, pathlib, random, sys
import tiktoken

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + ENDING,
    r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + ENDING,
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])

TEXTS = [
    "", " ", "\n", "a", "Which digit is this?", "seven", "What is seven plus nine?", "the tag <|media_pad|> marks a picture",
    "<|im_end|><|im_user|>[BOS][EOS]", "Hello, world!", "HELLO World helloWorld HTTPServer iPhone", "don't I'LL we'Ve you'RE he'd it's 'tis o'clock",
    "'S 'ſ x'ſ A'T's", "1234567890 12 3 4567", "½ ² ③ Ⅷ ٣٤٥٦ 〇一二", "中文English混合", "你好，世界！今天是2024年5月。", "日本語のテキストとカタカナ、漢字かな交じり々",
    "한국어 텍스트 mixed 中文", "Привет, мир! ΑΒΓ αβγ ǅ ǈ", "e\u0301te\u0301 cafe\u0301 \u0301a \u3000全角\u3000space", "👍🏽 👩‍👩‍👧‍👦 emoji🎉🎉!!", "naïve façade Ünïcödé ﬁ ß ẞ",
    "tabs\t\tand  double   spaces    end   ", "  leading\n\n\n  lines \r\n\r\n x\n", "a\u00a0b\u2003c\u2028d\u2029e\u0085f\u000bg\u001ch", "if (x==1) {\n\treturn -1;\n}\n",
    "https://example.com/a?b=c&d=e#f", "...!!!???---___***", "a.b.c a-b_c", "\u200b\u200d\ufeffzero", "नमस्ते दुनिया ภาษาไทย עברית العربية",
    "𠀀𠮷野家 𝒜𝓑 𝟘𝟙𝟚𝟛", "々〆ヶ 〡〢〣 ⺀⻰", "\x00\x01\x7f", "ʰʲa ªº", "x" * 40 + "Y" * 40 + " " * 40, "\n" * 5 + " " * 5 + "\n", " \n \n a", "!\n\n\n?\r\n",
]


def ids_of(encoding, texts):
    return [{"text": t, "ids": encoding.encode_ordinary(t)} for t in texts]


def vocabulary(tokens):
    return tiktoken.Encoding("golden", pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens={})


def main(folder):
    lines = (pathlib.Path(folder) / "tiktoken.model").read_text().split("\n")
    digits = [base64.b64decode(line.split()[0]) for line in lines if line]
    single = [bytes([b]) for b in range(256)]

    # Pieces are found by giving tiktoken ever more tokens: all substrings that end where a character ends.
    candidates = list(dict.fromkeys(single + [t[i:j].encode() for t in TEXTS for i in range(len(t)) for j in range(i + 1, min(len(t), i + 48) + 1)]))
    wide = vocabulary(candidates)
    pieces = list(dict.fromkeys(single + [candidates[i] for t in TEXTS for i in wide.encode_ordinary(t)]))

    rng = random.Random(7)
    merges = list(single)
    while len(merges) < 256 + 150:
        token = b"".join(rng.choice([b"a", b"b", b"c"] + merges[256:]) for _ in range(2))
        if token not in merges and len(token) <= 24:
            merges.append(token)
    words = ["".join(rng.choice("abc") for _ in range(n)) for n in (2, 3, 5, 8, 13, 40, 90, 150, 700, 1500)] + ["a" * 1200, "ab" * 300]

    broken = [[0xff, 0x61], [0xe4, 0xbd, 0x61], [0xf0, 0x9f, 0x91], [0xc0, 0x80], [0xed, 0xa0, 0x80], [0xe4, 0xbd, 0xa0, 0xe5], [0xf4, 0x90, 0x80, 0x80]]
    golden = {
        "digits": ids_of(vocabulary(digits), TEXTS),
        "pieces": {"tokens": [base64.b64encode(t).decode() for t in pieces], "cases": ids_of(vocabulary(pieces), TEXTS)},
        "merges": {"tokens": [base64.b64encode(t).decode() for t in merges], "cases": ids_of(vocabulary(merges), words)},
        "decode": [{"ids": b, "text": bytes(b).decode("utf-8", errors="replace")} for b in broken],
    }
    out = pathlib.Path(__file__).with_name("tokenizer.json")
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print(out, out.stat().st_size, "bytes;", len(pieces) - 256, "pieces")


if __name__ == "__main__":
    main(sys.argv[1])
