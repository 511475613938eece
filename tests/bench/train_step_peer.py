"""The peer of train_step: transformers' Kimi K2.5 with torch.optim.AdamW(fused=True). Speaks train_step's protocol on stdin and stdout.

    train_step_peer.py CONFIG.json SEQUENCE ROWS COLUMNS THREADS [--compile]
"""
import json
import os
import resource
import sys
import time


def main():
    path, sequence, rows, columns, threads = sys.argv[1], *map(int, sys.argv[2:6])
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    import torch
    import transformers
    from transformers.models.kimi_k25 import configuration_kimi_k25, modeling_kimi_k25

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    text = dict(config["text_config"], rope_theta=config["text_config"]["rope_theta"])
    text.pop("architectures", None)
    text["model_type"] = "deepseek_v3"
    vision = config["vision_config"]
    media = config["media_placeholder_token_id"]
    peer_config = configuration_kimi_k25.Kimi_K25Config(
        text_config=text,
        vision_config={
            "hidden_size": vision["vt_hidden_size"], "intermediate_size": vision["vt_intermediate_size"],
            "num_hidden_layers": vision["vt_num_hidden_layers"], "num_attention_heads": vision["vt_num_attention_heads"],
            "patch_size": vision["patch_size"], "pos_emb_height": vision["init_pos_emb_height"],
            "pos_emb_width": vision["init_pos_emb_width"], "pos_emb_time": vision["init_pos_emb_time"],
            "merge_kernel_size": tuple(vision["merge_kernel_size"])},
        projection_hidden_size=vision["vt_hidden_size"], image_token_id=media, video_token_id=text["vocab_size"] - 1,
        tie_word_embeddings=False)
    model = modeling_kimi_k25.Kimi_K25ForConditionalGeneration._from_config(
        peer_config, attn_implementation="sdpa", experts_implementation="eager").float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    ids = torch.randint(8, text["vocab_size"] - 1, (1, sequence))
    ids[0, 8:8 + rows * columns // 4] = media
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == media, -100), "attention_mask": torch.ones_like(ids),
             "use_cache": False, "pixel_values": torch.randn(rows * columns, 3, vision["patch_size"], vision["patch_size"]),
             "image_grid_thw": torch.tensor([[1, rows, columns]])}
    call = torch.compile(model) if "--compile" in sys.argv else model
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = call(**batch).loss
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"seconds": end - begin, "forward": forward - begin, "backward": backward - forward, "optimizer": end - backward,
                          "loss": float(loss.detach()), "peak_mib": peak}), flush=True)


if __name__ == "__main__":
    main()
