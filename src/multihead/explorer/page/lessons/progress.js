// What the learner has done, kept in the browser where it keeps anything.

const KEY = "multihead-learn";

/** @param {() => Storage} storage may throw, or what it gives may */
export function createProgress(storage) {
  const done = new Set(/** @type {string[]} */ ([]));
  let kept = true;
  try {
    const read = JSON.parse(storage().getItem(KEY) ?? "[]");
    if (Array.isArray(read)) for (const name of read) if (typeof name === "string") done.add(name);
  } catch {
    kept = false;
  }

  function write() {
    try {
      storage().setItem(KEY, JSON.stringify([...done]));
    } catch {
      kept = false;
    }
  }

  return {
    has: (/** @type {string} */ name) => done.has(name),
    get count() {
      return done.size;
    },
    /** Whether the browser keeps it. */
    get kept() {
      return kept;
    },
    add(/** @type {string} */ name) {
      if (done.has(name)) return;
      done.add(name);
      write();
    },
    forget() {
      done.clear();
      write();
    },
  };
}
