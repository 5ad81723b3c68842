// Numbers as files: a table as CSV, tensors as npz, which numpy.load reads (a zip, not compressed, of npy files).

/** @typedef {{shape: number[], data: Float32Array | Int32Array | Uint8Array | Float64Array}} Tensor */
/** @typedef {{rows: number, columns: number, rowLabels?: string[], columnLabels?: string[], value: (row: number, column: number) => number}} Table */

const DTYPES = /** @type {[any, string][]} */ ([[Float32Array, "<f4"], [Float64Array, "<f8"], [Int32Array, "<i4"], [Uint8Array, "|u1"]]);
const EARLIEST = 0x21; // 1 January 1980, the first day a zip knows: equal numbers make equal files

/** Numbers as comma-separated values. @param {Table} t */
export function csvOf(t) {
  const cell = (/** @type {string} */ text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [["", ...Array.from({ length: t.columns }, (_, c) => t.columnLabels?.[c] ?? String(c))].map(cell).join(",")];
  for (let r = 0; r < t.rows; r++) lines.push([cell(t.rowLabels?.[r] ?? String(r)), ...Array.from({ length: t.columns }, (_, c) => plain(t.value(r, c)))].join(","));
  return `${lines.join("\n")}\n`;
}

/** A number as Python and spreadsheets read it. @param {number} value */
function plain(value) {
  return Number.isFinite(value) ? String(value) : Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

/** "weights_8x12x12", with what else there is to say: "weights_8x12x12_layer-1-head-3". @param {string} name @param {number[]} shape @param {string} [note] */
export function fileName(name, shape, note = "") {
  const said = note.normalize("NFKD").replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60);
  return `${name.replace(/[^A-Za-z0-9_.]+/g, "-")}_${shape.join("x") || "1"}${said ? `_${said}` : ""}`;
}

/** A tensor as an npy file, version 1.0. @param {Tensor} t */
export function npyOf(t) {
  const dtype = DTYPES.find(([type]) => t.data instanceof type)?.[1];
  if (!dtype) throw new Error(`numbers of kind ${t.data.constructor.name}: expected floats, integers or bytes`);
  const shape = `(${t.shape.join(", ")}${t.shape.length === 1 ? "," : ""})`;
  const text = `{'descr': '${dtype}', 'fortran_order': False, 'shape': ${shape}, }`;
  const length = Math.ceil((10 + text.length + 1) / 64) * 64 - 10; // the data begins at a multiple of 64
  const out = new Uint8Array(10 + length + t.data.byteLength);
  out.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, length & 255, length >> 8]);
  out.set(new TextEncoder().encode(`${text.padEnd(length - 1)}\n`), 10);
  out.set(new Uint8Array(t.data.buffer, t.data.byteOffset, t.data.byteLength), 10 + length);
  return out;
}

/** @type {Uint32Array | null} */
let sums = null;

/** The checksum of zip files. @param {Uint8Array} bytes */
export function crc32(bytes) {
  sums ??= Uint32Array.from({ length: 256 }, (_, n) => {
    let c = n;
    for (let bit = 0; bit < 8; bit++) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
    return c;
  });
  let sum = 0xffffffff;
  for (let i = 0; i < bytes.length; i++) sum = sums[(sum ^ bytes[i]) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}

/** Tensors by name as an npz file. @param {Record<string, Tensor>} tensors */
export function npzOf(tensors) {
  /** @type {Uint8Array[]} */
  const parts = [];
  /** @type {Uint8Array[]} */
  const directory = [];
  let at = 0;
  for (const [name, t] of Object.entries(tensors)) {
    const title = new TextEncoder().encode(`${name}.npy`);
    const data = npyOf(t);
    const sum = crc32(data);
    const local = record(30, title, [[0, 4, 0x04034b50], [4, 2, 20], [6, 2, 0x800], [12, 2, EARLIEST], [14, 4, sum], [18, 4, data.length], [22, 4, data.length], [26, 2, title.length]]);
    directory.push(record(46, title, [[0, 4, 0x02014b50], [4, 2, 20], [6, 2, 20], [8, 2, 0x800], [14, 2, EARLIEST], [16, 4, sum], [20, 4, data.length], [24, 4, data.length], [28, 2, title.length], [42, 4, at]]));
    parts.push(local, data);
    at += local.length + data.length;
  }
  const size = directory.reduce((sum, entry) => sum + entry.length, 0);
  const count = directory.length;
  const end = record(22, new Uint8Array(), [[0, 4, 0x06054b50], [8, 2, count], [10, 2, count], [12, 4, size], [16, 4, at]]);
  return joined([...parts, ...directory, end]);
}

/** A record of a zip file: little-endian numbers at their places, then a name. @param {number} length @param {Uint8Array} name @param {[number, number, number][]} fields place, bytes and value */
function record(length, name, fields) {
  const out = new Uint8Array(length + name.length);
  const view = new DataView(out.buffer);
  for (const [place, bytes, value] of fields) bytes === 2 ? view.setUint16(place, value, true) : view.setUint32(place, value, true);
  out.set(name, length);
  return out;
}

/** @param {Uint8Array[]} parts */
function joined(parts) {
  const out = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}
