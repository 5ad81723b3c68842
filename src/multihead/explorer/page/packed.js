// A picture that is too large for an address travels in it packed: as WebP (or JPEG), as exact as there is room for.
// The page that packed it goes on with the exact pixels; whoever opens the link gets the packed ones, and is told.

const ROOM = 14000; // characters of the address

/** Whether pixels, as base64, are left out of the address. @param {string} pixels */
export function tooLarge(pixels) {
  return pixels.length > ROOM;
}

/** What to try, from the most exact: the quality, and the side of the picture. @param {number} side @returns {[number, number][]} */
export function attempts(side) {
  const found = /** @type {[number, number][]} */ ([]);
  for (let s = side; s >= 16; s = Math.floor(s / 2)) for (const quality of [0.92, 0.8, 0.6, 0.4]) found.push([quality, s]);
  return found;
}

/** Base64 as it may stand in an address, and back. @param {string} text */
export const toAddress = (text) => text.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
/** @param {string} text */
export const fromAddress = (text) => text.replaceAll("-", "+").replaceAll("_", "/");

/** A picture on a canvas, packed; "" where the browser cannot. @param {HTMLCanvasElement} picture */
export function pack(picture) {
  for (const [quality, side] of attempts(picture.width)) {
    const sheet = document.createElement("canvas");
    sheet.width = side;
    sheet.height = Math.max(1, Math.round((side * picture.height) / picture.width));
    /** @type {CanvasRenderingContext2D} */ (sheet.getContext("2d")).drawImage(picture, 0, 0, sheet.width, sheet.height);
    const webp = sheet.toDataURL("image/webp", quality);
    const made = webp.startsWith("data:image/webp") ? webp : sheet.toDataURL("image/jpeg", quality);
    const text = toAddress(made.slice(made.indexOf(",") + 1));
    if (text.length <= ROOM) return text;
  }
  return "";
}

/** The file that was packed. @param {string} packed */
export function unpack(packed) {
  return new Blob([Uint8Array.from(atob(fromAddress(packed)), (c) => c.charCodeAt(0))]);
}
