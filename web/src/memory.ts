/** Sizes of one Gated DeltaNet layer. */
export interface LayerDims {
  name: string;
  valueHeads: number;
  keyHeads: number;
  keyWidth: number;
  valueWidth: number;
  layers: number;
}

/** Qwen3.5-9B: 24 of its 32 layers are Gated DeltaNet. */
export const QWEN35_9B: LayerDims = { name: "Qwen3.5-9B", valueHeads: 32, keyHeads: 16, keyWidth: 128, valueWidth: 128, layers: 24 };

/** float32 bytes of a layer's scratch: a state per node, or a pseudo-value and a cumulative gate per node and head. */
export function scratch(dims: LayerDims, nodes: number, batch: number): { snapshots: number; pseudoValues: number } {
  const rows = nodes * batch * dims.valueHeads;
  return { snapshots: 4 * rows * dims.keyWidth * dims.valueWidth, pseudoValues: 4 * rows * (dims.valueWidth + 1) };
}
