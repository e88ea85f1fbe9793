// The admin routes, asked with the reader's key. Each failure becomes one ApiError with a sentence.

const TIMEOUT_MS = 15000;
const STORE = "vtoken-admin-key";
const ROOT = new URL("../..", import.meta.url); // this file is <root>/vtoken/ui/api.js

export class ApiError extends Error {
  constructor(message, { status = 0, field = null } = {}) {
    super(message);
    this.status = status; // 0: no answer at all
    this.field = field;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORE),
  set: (value) => sessionStorage.setItem(STORE, value),
  forget: () => sessionStorage.removeItem(STORE),
};

export async function ask(path, { method = "GET", body, headers = {} } = {}) {
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), {
      method,
      headers: { Authorization: `Bearer ${key.get() ?? ""}`, ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(TIMEOUT_MS),
      cache: "no-store",
    });
  } catch (error) {
    const slow = error.name === "TimeoutError";
    throw new ApiError(slow ? `no answer within ${TIMEOUT_MS / 1000} s` : "the server cannot be reached");
  }
  const document = await answer.json().catch(() => null);
  if (answer.ok && document !== null) return document;
  const detail = document?.error;
  const message = detail?.message ?? (answer.ok ? "the answer is not JSON" : `the server answered ${answer.status}`);
  throw new ApiError(message, { status: answer.status, field: detail?.field ?? null });
}
