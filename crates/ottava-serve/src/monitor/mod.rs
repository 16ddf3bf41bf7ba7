//! The page that shows runs, and the data that the page requests. All files of the page are compiled into the program; the page loads nothing from
//! other hosts.

mod page;

#[cfg(test)]
mod tests;

use crate::connections::{Connection, Connections, listen};
use crate::preparing::{SHORT_BYTES, beside};
use crate::server::runtime;
use crate::stranger::Stranger;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ottava_common::Error;
use ottava_train::monitor::{Answer, Form, Metrics, Monitor};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// The interval between checks for a stop.
const POLL: Duration = Duration::from_millis(50);
/// The time limit for a browser to send a request, and to read any part of an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(75);
/// The maximum number of connections.
const MAX_CONNECTIONS: usize = 256;
/// The time that connections have to send their answers after a stop.
const GRACE: Duration = Duration::from_secs(1);

/// The content security policy of the page: it may load data only from this server.
const POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The state that all requests share.
struct Watched {
    monitor: Mutex<Monitor>,
    /// A text that differs between servers, so that a page notices a new server, whose revisions start again at 0.
    epoch: String,
    /// Whether only this machine can connect.
    is_local: bool,
    /// A permit for the export of metrics: one at a time reads a whole file.
    exports: Arc<Semaphore>,
}

impl Watched {
    fn monitor(&self) -> MutexGuard<'_, Monitor> {
        self.monitor.lock().expect("no thread panics with it")
    }
}

/// Shows `runs` at `address` until `stops` returns true; port 0 chooses a free port. Calls `ready` with the address once requests are answered.
///
/// # Errors
/// [`Error::Io`] if the address cannot be used.
pub fn monitor(
    runs: Monitor,
    address: SocketAddr,
    stops: impl Fn() -> bool,
    ready: impl FnOnce(SocketAddr),
) -> ottava_common::Result<()> {
    let io = |error| Error::io(address.to_string())(error);
    let runtime = runtime().map_err(io)?;
    let listener = runtime.block_on(async { listen(address) }).map_err(io)?;
    let address = listener.local_addr().map_err(io)?;
    let started = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    let watched = Arc::new(Watched {
        monitor: Mutex::new(runs),
        epoch: format!("{started:x}-{}", std::process::id()),
        is_local: address.ip().is_loopback(),
        exports: Arc::new(Semaphore::new(1)),
    });
    let app = routes(watched.clone());
    let connections = Connections::new(MAX_CONNECTIONS, CLIENT_TIMEOUT);
    ready(address);
    // Read large files before the first page requests them.
    runtime.spawn_blocking(move || watched.monitor().refresh());
    runtime.block_on(async {
        let stopped = async {
            while !stops() {
                tokio::time::sleep(POLL).await;
            }
            connections.drain(GRACE).await
        };
        tokio::select! {
            () = connections.accept(listener, app) => {}
            _ = stopped => {}
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

fn routes(watched: Arc<Watched>) -> Router {
    let app = page::FILES.iter().fold(Router::new(), |app, file| {
        let answer = ([(header::CONTENT_TYPE, file.kind), (header::CACHE_CONTROL, "no-cache")], file.bytes);
        app.route(file.path, get(move || std::future::ready(answer)))
    });
    app.route("/api/runs", get(runs))
        .route("/api/logs", get(logs))
        .route("/api/settings", get(settings))
        .route("/api/metrics.json", get(metrics_json))
        .route("/api/metrics.csv", get(metrics_csv))
        .fallback(async || (StatusCode::NOT_FOUND, "there is nothing at this path\n"))
        .layer(from_fn_with_state(watched.clone(), guard))
        .with_state(watched)
}

/// Refuses requests of other sites, and forbids the page to load data from them.
async fn guard(State(watched): State<Arc<Watched>>, request: Request, next: Next) -> Response {
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    if let Some(connection) = &connection {
        connection.work();
    }
    let mut response = match Stranger::of(request.headers(), watched.is_local) {
        None => next.run(request).await,
        Some(_) => {
            (StatusCode::FORBIDDEN, "this request is of another site; open the address that `ottava monitor` prints\n")
                .into_response()
        }
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    match connection {
        Some(connection) => response.map(|body| connection.track(body)),
        None => response,
    }
}

/// Parses the query of the page: `epoch` and `since` of `?epoch=E&since=RUN:REVISION,RUN:REVISION`.
fn asked(query: &str) -> Option<(String, BTreeMap<usize, u64>)> {
    let (mut epoch, mut since) = (String::new(), BTreeMap::new());
    for (key, value) in query.split('&').filter_map(|part| part.split_once('=')) {
        match key {
            "epoch" => epoch = value.to_string(),
            "since" => {
                for entry in value.split([',']).filter(|entry| !entry.is_empty()) {
                    let (run, revision) = entry.split_once(':')?;
                    since.insert(run.parse().ok()?, revision.parse().ok()?);
                }
            }
            _ => return None,
        }
    }
    Some((epoch, since))
}

/// The answer to a query of the page.
#[derive(Serialize)]
struct Runs<'a> {
    epoch: &'a str,
    /// The time on this machine, in seconds since 1970.
    now: f64,
    #[serde(flatten)]
    answer: Answer,
}

fn bad_request(text: &'static str) -> Response {
    (StatusCode::BAD_REQUEST, text).into_response()
}

fn json(value: &impl Serialize) -> Response {
    let text = serde_json::to_string(value).expect("answers are plain data");
    ([(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")], text).into_response()
}

/// Answers with all runs, and with the records that the page lacks of the runs that it shows.
async fn runs(State(watched): State<Arc<Watched>>, request: Request) -> Response {
    let Some((epoch, mut since)) = asked(request.uri().query().unwrap_or_default()) else {
        return bad_request("expected ?epoch=E&since=RUN:REVISION,...\n");
    };
    if epoch != watched.epoch {
        since.values_mut().for_each(|revision| *revision = 0);
    }
    let answered = beside(SHORT_BYTES, move || {
        let answer = {
            let mut monitor = watched.monitor();
            monitor.refresh();
            monitor.answer(&since)
        };
        let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
        Ok(json(&Runs { epoch: &watched.epoch, now, answer }))
    });
    answered.await.unwrap_or_else(IntoResponse::into_response)
}

/// Answers with what `read` returns about the run in `?run=RUN`.
async fn of_run(
    watched: Arc<Watched>,
    request: Request,
    read: impl FnOnce(&Monitor, usize) -> Option<Response> + Send + 'static,
) -> Response {
    let run = request.uri().query().and_then(|query| query.strip_prefix("run=")?.parse().ok());
    let Some(run) = run else { return bad_request("expected ?run=RUN\n") };
    let answered = beside(SHORT_BYTES, move || {
        let answer = read(&watched.monitor(), run);
        Ok(answer.unwrap_or_else(|| (StatusCode::NOT_FOUND, "there is no such run\n").into_response()))
    });
    answered.await.unwrap_or_else(IntoResponse::into_response)
}

/// Answers with the ends of the logs of all ranks of a run.
async fn logs(State(watched): State<Arc<Watched>>, request: Request) -> Response {
    of_run(watched, request, |runs, run| Some(json(&runs.logs(run)?))).await
}

/// Answers with the settings of a run.
async fn settings(State(watched): State<Arc<Watched>>, request: Request) -> Response {
    of_run(watched, request, |runs, run| Some(runs.settings(run)?.map_or_else(unreadable, |settings| json(&settings))))
        .await
}

/// Answers with all metrics of a run, as a file of JSON.
async fn metrics_json(State(watched): State<Arc<Watched>>, request: Request) -> Response {
    exported(watched, request, "application/json", Form::Json).await
}

/// Answers with all metrics of a run, as a table.
async fn metrics_csv(State(watched): State<Arc<Watched>>, request: Request) -> Response {
    exported(watched, request, "text/csv; charset=utf-8", Form::Csv).await
}

async fn exported(watched: Arc<Watched>, request: Request, kind: &'static str, form: Form) -> Response {
    let Ok(permit) = watched.exports.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "another export is in progress; try again when it is complete\n")
            .into_response();
    };
    let file = move |metrics: Metrics| {
        let headers = [
            (header::CONTENT_TYPE, kind),
            (header::CACHE_CONTROL, "no-store"),
            (header::CONTENT_DISPOSITION, "attachment"),
        ];
        (headers, streamed(metrics, form, permit)).into_response()
    };
    of_run(watched, request, move |runs, run| Some(runs.metrics(run)?.map_or_else(unreadable, file))).await
}

/// Returns a body that a thread writes while it reads the metrics. The thread ends if the client leaves.
fn streamed(metrics: Metrics, form: Form, permit: OwnedSemaphorePermit) -> Body {
    let (sender, parts) = mpsc::channel(4);
    tokio::task::spawn_blocking(move || {
        let written = metrics.write(form, &mut |part| sender.blocking_send(Ok(part)).is_ok());
        if let Err(error) = written {
            let _ = sender.blocking_send(Err(std::io::Error::other(error.to_string())));
        }
        drop(permit);
    });
    Body::from_stream(futures_util::stream::unfold(parts, async |mut parts| Some((parts.recv().await?, parts))))
}

/// The answer about a file of a run that cannot be read.
fn unreadable(error: Error) -> Response {
    (StatusCode::UNPROCESSABLE_ENTITY, format!("{error}\n")).into_response()
}
