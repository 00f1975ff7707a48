/** What can go wrong. `status` is HTTP's; `param` names the field that is at fault. */
export class SglError extends Error {
  constructor(message: string, readonly status: number | null = null, readonly code: string | null = null, readonly param: string | null = null) {
    super(message);
    this.name = new.target.name;
  }
}
/** The request or program cannot be served as it stands. */
export class InvalidRequest extends SglError {}
/** A constraint cannot be compiled. */
export class GrammarError extends InvalidRequest {}
/** The API key is missing or wrong, or may not do this. */
export class Unauthorized extends SglError {}
/** The server has as much to do as it takes: try again later. */
export class QueueFull extends SglError {}
/** The program or request took longer than it may. */
export class TimedOut extends SglError {}
/** The program or request was aborted. */
export class Aborted extends SglError {}
/** The server's engine does not run: it is starting, or being replaced. */
export class EngineDead extends SglError {}
/** The connection broke and could not be taken up again. */
export class ConnectionLost extends SglError {}
/** What was recorded makes no program, such as a value that nothing generates. */
export class ProgramError extends SglError {}

const CLASSES: Record<string, typeof SglError> = { GrammarError, GrammarTooLarge: GrammarError, InvalidRequest, QueueFull, RequestTimeout: TimedOut, RequestAborted: Aborted, EngineDead };

interface Told { message?: string; code?: string | null; param?: string | null; class?: string }

/** The error that a server told, by its class's name or HTTP status. */
export function toldError(told: Told | undefined, status: number | null): SglError {
  const named = told?.class === undefined ? undefined : CLASSES[told.class];
  const byStatus = status === 401 || status === 403 ? Unauthorized : status === 429 ? QueueFull : status === 408 ? TimedOut : status === 503 ? EngineDead : status !== null && status >= 400 && status < 500 ? InvalidRequest : SglError;
  return new (named ?? byStatus)(told?.message ?? `the server answered ${status}`, status, told?.code ?? null, told?.param ?? null);
}
