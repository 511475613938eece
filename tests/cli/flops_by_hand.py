"""Model FLOPs of a training step, counted by hand from a config.json and the batch alone. Shares no code with the product.

The count goes matrix by matrix: every product of [rows, in] x [in, out] is 2 * rows * in * out. Attention of a document of n tokens
has n * n / 2 pairs of query and visible key, a picture n * n. A step is three times its forward; a frozen part does the forward
alone where nothing before it is trained, and else passes gradients on, which makes two.
"""


def decoder_forward(text, documents):
    """FLOPs of all layers and the head, by layer; the head last."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    rank, query_rank = text["kv_lora_rank"], text.get("q_lora_rank")
    tokens = sum(documents)

    def matmul(rows, width_in, width_out):
        return 2 * rows * width_in * width_out

    def gated(width):
        return matmul(tokens, hidden, width) * 2 + matmul(tokens, width, hidden)

    counts = []
    for layer in range(text["num_hidden_layers"]):
        flops = 0
        if query_rank:
            flops += matmul(tokens, hidden, query_rank) + matmul(tokens, query_rank, heads * (nope + rope))
        else:
            flops += matmul(tokens, hidden, heads * (nope + rope))
        flops += matmul(tokens, hidden, rank + rope)
        flops += matmul(tokens, rank, heads * nope) + matmul(tokens, rank, heads * value)
        for length in documents:
            # Scores and their product with the values, of the lower half: 2 * n * n / 2 each.
            flops += heads * length * length * (nope + rope) + heads * length * length * value
        flops += matmul(tokens, heads * value, hidden)
        if layer < text["first_k_dense_replace"] or layer % text.get("moe_layer_freq", 1) != 0:
            flops += gated(text["intermediate_size"])
        else:
            flops += matmul(tokens, hidden, text["n_routed_experts"])
            for _ in range(text["num_experts_per_tok"]):
                flops += gated(text["moe_intermediate_size"])
            flops += gated(text["moe_intermediate_size"] * text["n_shared_experts"])
        counts.append(flops)
    counts.append(matmul(tokens, hidden, text["vocab_size"]))
    return counts


def vision_forward(config, text, pictures):
    """(tower, projector); pictures are (frames, rows, columns) of patches."""
    vision = config["vision_config"]
    get = lambda name: vision.get("vt_" + name, vision.get(name))  # noqa: E731
    width, inner, blocks = get("hidden_size"), get("intermediate_size"), get("num_hidden_layers")
    height, across = vision["merge_kernel_size"]
    tower = projector = 0
    for frames, rows, columns in pictures:
        patches = frames * rows * columns
        tower += 2 * patches * 3 * vision["patch_size"] ** 2 * width
        for _ in range(blocks):
            tower += 2 * patches * width * 3 * width + 2 * patches * width * width  # wqkv, wo
            tower += 2 * 2 * patches * patches * width  # scores and values of every head
            tower += 2 * patches * width * inner * 2
        merged = (rows // height) * (columns // across)  # frames of a clip are averaged
        window = width * height * across
        projector += 2 * merged * window * window + 2 * merged * window * text["hidden_size"]
    return tower, projector


def training_flops(config, batch, frozen=()):
    """{"decoder", "vision", "projector", "total"}; a batch is a list of {"documents": [...], "pictures": [...]}. `frozen` holds of
    vision, projector, decoder those that do not move."""
    text = config.get("text_config", config)
    sees = "vision_config" in config
    decoder = tower = projector = 0
    for microbatch in batch:
        decoder += sum(decoder_forward(text, microbatch["documents"]))
        if sees:
            one_tower, one_projector = vision_forward(config, text, microbatch["pictures"])
            tower += one_tower
            projector += one_projector

    def passes(part, before):
        if part not in frozen:
            return 3
        return 2 if any(name not in frozen for name in before) else 1

    counts = {"vision": tower * passes("vision", []),
              "projector": projector * passes("projector", ["vision"]),
              "decoder": decoder * passes("decoder", ["vision", "projector"] if sees else [])}
    counts["total"] = sum(counts.values())
    return counts
