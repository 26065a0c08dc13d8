"""Copies a trained pair into the place it ships from; the target's weights become shards with an index."""
import json
import os
import shutil
import struct
import sys

SHARD_BYTES = 15_000_000


def read_header(raw):
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + size]), 8 + size


def write_shard(path, tensors, meta):
    header, offset = {"__metadata__": meta}, 0
    for name, info, data in tensors:
        header[name] = dict(dtype=info["dtype"], shape=info["shape"], data_offsets=[offset, offset + len(data)])
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors:
            f.write(data)


def shard(source, folder):
    with open(source, "rb") as f:
        raw = f.read()
    header, base = read_header(raw)
    meta = header.pop("__metadata__", {"format": "pt"})
    order = sorted(header, key=lambda name: header[name]["data_offsets"][0])
    groups, size = [[]], 0
    for name in order:
        begin, end = header[name]["data_offsets"]
        if size + end - begin > SHARD_BYTES and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append((name, header[name], raw[base + begin:base + end]))
        size += end - begin
    index = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        write_shard(os.path.join(folder, file), group, meta)
        index.update({name: file for name, _, _ in group})
    total = sum(len(data) for group in groups for _, _, data in group)
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, f, indent=1)


def main(source, dest):
    for part in ("target", "drafter"):
        os.makedirs(os.path.join(dest, part), exist_ok=True)
        for file in os.listdir(os.path.join(dest, part)):
            os.remove(os.path.join(dest, part, file))
        for file in os.listdir(os.path.join(source, part)):
            if file != "model.safetensors" or part == "drafter":
                shutil.copy(os.path.join(source, part, file), os.path.join(dest, part, file))
    shard(os.path.join(source, "target", "model.safetensors"), os.path.join(dest, "target"))
    for file in ("eval.json", "prompts.json", "corpus_manifest.json"):
        if os.path.exists(os.path.join(source, file)):
            shutil.copy(os.path.join(source, file), os.path.join(dest, file))


if __name__ == "__main__":
    main(*sys.argv[1:3])
