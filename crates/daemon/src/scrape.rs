//! The HTTP endpoint: `/metrics` and `/healthz`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

use crate::crowd::Crowd;
use crate::driver::Question;
use crate::log::Floods;
use crate::metrics::Metrics;

/// Connections at a time; past it the oldest gives way.
const MOST_CONNECTIONS: usize = 32;
/// How long a connection may take to ask.
const ASKING: Duration = Duration::from_secs(3);
/// How long a connection may take in all.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves until it is dropped.
pub(crate) async fn serve(listener: TcpListener, metrics: Arc<Metrics>, driver: mpsc::Sender<Question>) {
    let mut scrapers = Crowd::new(MOST_CONNECTIONS);
    let floods = Floods::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => scrapers.admit(attend(stream, Arc::clone(&metrics), driver.clone())),
            Err(error) => {
                let what = "accepting a scrape failed";
                if floods.admit(what, None) {
                    tracing::warn!(%error, "{what}");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn attend(stream: TcpStream, metrics: Arc<Metrics>, driver: mpsc::Sender<Question>) {
    let service = service_fn(|request| {
        let (metrics, driver) = (Arc::clone(&metrics), driver.clone());
        async move { Ok::<_, Infallible>(answer(&request, &metrics, &driver).await) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(ASKING)
        .keep_alive(false);
    // Whatever a scraper does wrong is its own trouble.
    let _ = tokio::time::timeout(PATIENCE, http.serve_connection(TokioIo::new(stream), service)).await;
}

async fn answer(
    request: &Request<Incoming>,
    metrics: &Metrics,
    driver: &mpsc::Sender<Question>,
) -> Response<Full<Bytes>> {
    // The body of an answer to HEAD is left out by hyper.
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
    }
    match request.uri().path() {
        "/metrics" => {
            let (reply, status) = oneshot::channel();
            let asked = driver.send(Question::Status(reply)).await.is_ok();
            let Some(status) = (if asked { status.await.ok() } else { None }) else {
                return text(StatusCode::SERVICE_UNAVAILABLE, "the daemon is shutting down\n");
            };
            match metrics.render(&status) {
                Ok(metrics) => {
                    let mut response = text(StatusCode::OK, metrics);
                    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                    let kind = hyper::header::HeaderValue::from_static(kind);
                    response.headers_mut().insert(hyper::header::CONTENT_TYPE, kind);
                    response
                }
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            }
        }
        "/healthz" => {
            let (reply, working) = oneshot::channel();
            let asked = driver.send(Question::Working(reply)).await.is_ok();
            if asked && working.await.unwrap_or(false) {
                text(StatusCode::OK, "ok\n")
            } else {
                text(StatusCode::SERVICE_UNAVAILABLE, "the daemon is shutting down\n")
            }
        }
        _ => text(StatusCode::NOT_FOUND, "there are /metrics and /healthz\n"),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
}
