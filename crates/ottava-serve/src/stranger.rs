//! Requests that a web page of another site makes a browser send to a server that trusts every client that can connect.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use std::net::IpAddr;

/// The header that shows that a request comes from another site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stranger {
    /// The `Origin` is not the server's.
    Origin,
    /// The `Host` is a name of another site that points to this machine.
    Host,
}

impl Stranger {
    /// Checks `headers`. `is_local` says that only this machine can connect to the server.
    pub fn of(headers: &HeaderMap, is_local: bool) -> Option<Stranger> {
        let (host, origin) = (text_of(headers, header::HOST), text_of(headers, header::ORIGIN));
        if origin.is_some_and(|origin| origin.split_once("://").map(|(_, site)| site) != host) {
            return Some(Stranger::Origin);
        }
        (is_local && host.is_some_and(|host| !names_this_machine(host))).then_some(Stranger::Host)
    }
}

/// Returns the value of a header.
pub fn text_of(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or("unreadable"))
}

/// Whether a `Host` is a name or address by which this machine reaches itself.
fn names_this_machine(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}
