// The page's modules: as they lie, or out of the bundle that a saved page is made of (MULTIHEAD_BUNDLE).
import { pathToFileURL } from "node:url";

const bundle = process.env.MULTIHEAD_BUNDLE;
if (bundle) globalThis.document = { getElementById: () => null };
const joined = bundle ? (await import(pathToFileURL(bundle))).modules : null;

export const load = async (name) => (joined ? joined[name] : import(new URL(`../../../src/multihead/explorer/page/${name}`, import.meta.url)));
