// Tensors, and the wire format they travel in: "MHT1", the length of a JSON header, the header, then little-endian bytes.

/** @typedef {{shape: number[], data: Float32Array | Int32Array | Uint8Array}} Tensor */
/** @typedef {{meta: any, tensors: Record<string, any>}} Answer */

/** A tensor of floats. @param {number[]} shape @param {Float32Array} [data] @returns {{shape: number[], data: Float32Array}} */
export function tensor(shape, data) {
  return { shape, data: data ?? new Float32Array(count(shape)) };
}

/** How many numbers a shape holds. @param {number[]} shape */
export function count(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

/** Where an index lies in the data. @param {number[]} shape @param {number[]} index */
export function offset(shape, index) {
  let at = 0;
  for (let axis = 0; axis < shape.length; axis++) at = at * shape[axis] + index[axis];
  return at;
}

/** One number. @param {Tensor} t @param {number[]} index */
export function valueAt(t, index) {
  return t.data[offset(t.shape, index)];
}

/** The first two axes change places: (A, B, C) → (B, A, C). @param {{shape: number[], data: Float32Array}} t */
export function swapAxes(t) {
  const [A, B, C] = t.shape;
  const out = new Float32Array(A * B * C);
  for (let a = 0; a < A; a++) {
    for (let b = 0; b < B; b++) out.set(t.data.subarray((a * B + b) * C, (a * B + b + 1) * C), (b * A + a) * C);
  }
  return tensor([B, A, C], out);
}

/** "(4, 8, 128)". @param {number[]} shape */
export function shapeText(shape) {
  return `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
}

/** float32 of the bits of a float16. @param {number} bits */
export function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}

/** Read an answer. Throws with words where it is none. @param {ArrayBuffer} buffer @returns {Answer} */
export function readAnswer(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < 8 || view.getUint32(0) !== 0x4d485431) throw new Error("the answer does not begin with MHT1: expected tensors of multihead");
  const length = view.getUint32(4, true);
  if (8 + length > buffer.byteLength) throw new Error(`the answer's header has ${length} bytes, but only ${buffer.byteLength - 8} came`);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  /** @type {Record<string, Tensor>} */
  const tensors = {};
  for (const [name, { dtype, shape, offset: at }] of Object.entries(header.tensors)) {
    tensors[name] = { shape, data: readNumbers(buffer, 8 + length + at, dtype, count(shape), name) };
  }
  return { meta: header.meta, tensors };
}

function readNumbers(/** @type {ArrayBuffer} */ buffer, /** @type {number} */ start, /** @type {string} */ dtype, /** @type {number} */ size, /** @type {string} */ name) {
  const bytes = { float32: 4, float16: 2, int32: 4, uint8: 1, bool: 1 }[dtype];
  if (!bytes) throw new Error(`tensor ${name} has dtype ${dtype}: expected float32, float16, int32, uint8 or bool`);
  if (start + size * bytes > buffer.byteLength) throw new Error(`tensor ${name} ends after the answer does: it was cut off on its way`);
  if (dtype === "float32") return new Float32Array(buffer, start, size);
  if (dtype === "int32") return new Int32Array(buffer, start, size);
  if (bytes === 1) return new Uint8Array(buffer, start, size);
  return Float32Array.from(new Uint16Array(buffer, start, size), halfToFloat);
}

/** JSON with sorted keys and no spaces: how a saved page finds its answers. @param {any} value @returns {string} */
export function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.keys(value).sort().map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join(",")}}`;
  }
  return JSON.stringify(value);
}
