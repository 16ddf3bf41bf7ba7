//! Local copies of single files of web servers.

use crate::copies::lock;
use crate::credentials::without;
use ottava_common::fs::{RealFs, replace_file, sync_parent};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, interrupt};
use ottava_http::{Answer, Client, Fault, Request, Retry, Url, offline};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The maximum size of an answer that is an error, in bytes.
const MAX_ANSWER: u64 = 1 << 20;

/// The maximum number of redirects of a request.
const MAX_REDIRECTS: usize = 5;

/// The time limit of one attempt to download a file.
const TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// The time for which an attempt waits until a server sends something.
const IDLE: Duration = Duration::from_secs(60);

/// The interval between checks for a stop.
const POLL: Duration = Duration::from_millis(100);

/// The number of bytes between two looks.
const LOOK: u64 = 8 << 20;

/// Returns the path of a copy of the file at the address `text` of the setting `setting`, in a subfolder of `folder`. A file that has changed on the
/// server is downloaded again: if its ETag has changed, or at each call without an ETag. If connections are forbidden, an existing copy is used. Calls `look` with the bytes that are there and all bytes.
///
/// Errors with [`Error::Config`] if connections are forbidden and there is no copy, and with [`Error::External`] if the server fails or refuses.
pub fn page(setting: &str, text: &str, folder: &Path, look: &mut dyn FnMut(u64, u64)) -> Result<PathBuf> {
    let url = Url::new(setting, text)?;
    let name = url.as_str().split('?').next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    if name.is_empty() || !url.to_string()[url.origin().len()..].contains('/') || name.starts_with('.') {
        return Err(Error::Config(format!(
            "`{setting}` is {url}, which names no file; name a file, such as {url}/train.jsonl"
        )));
    }
    let folder = folder_of(text, folder);
    let (path, etag) = (folder.join(name), folder.join(".etag"));
    let _lock = lock(&folder, &|| interrupt::check("waiting for another download of the same file"))?;
    let known = std::fs::read_to_string(&etag).ok().filter(|_| path.is_file());
    if known.is_some() && offline::reason().is_some() {
        return Ok(path);
    }
    let client = Client::new(url.clone(), None, MAX_ANSWER)?;
    let retry = Retry { attempts: 6, first_pause: Duration::from_millis(300) };
    let pause = |time: Duration| {
        sleep(time);
        interrupt::check("waiting for a server").is_ok()
    };
    let fetched =
        retry.run(pause, || fetch(&client, known.as_deref(), &path, IDLE, look)).map_err(
            |fault| match interrupt::check("downloading") {
                Err(stop) => stop,
                Ok(()) => Error::External(redacted(&url, &fault.words)),
            },
        )?;
    if let Some(found) = fetched {
        replace_file(&RealFs, &etag, found.as_bytes())?;
    }
    Ok(path)
}

/// Removes the copy of [`page`] in a subfolder of `folder`. What cannot be removed stays.
pub fn remove_page(text: &str, folder: &Path) {
    let _ = std::fs::remove_dir_all(folder_of(text, folder));
}

/// Returns the subfolder of `folder` with the copy of the file at the address `text`.
fn folder_of(text: &str, folder: &Path) -> PathBuf {
    folder.join(&sha256(text.as_bytes())[..16])
}

/// Replaces the values of the query of `url` in `text`: they may be keys.
fn redacted(url: &Url, text: &str) -> String {
    let query = url.as_str().split_once('?').map_or("", |(_, query)| query);
    let values = query.split('&').map(|part| part.split_once('=').map_or(part, |(_, value)| value));
    // A short value, such as a number, is no key, and would be found in other words.
    values.filter(|value| value.len() >= 8).fold(text.to_string(), |text, value| without(&text, value, "…"))
}

/// What the thread of a download sends.
enum News {
    /// The answer begins: its ETag and the number of its bytes.
    Start(String, Option<u64>),
    /// Some bytes of the file.
    Part(Vec<u8>),
    /// The end, with whether there is a new file.
    End(Result<bool, Fault>),
}

/// Downloads a file to `path`, unless it still has the ETag `known`. Returns the ETag of a download, or an empty text.
///
/// A thread waits for the server, so that a request to stop and a server that sends nothing for the time `idle` end the attempt.
fn fetch(
    client: &Client,
    known: Option<&str>,
    path: &Path,
    idle: Duration,
    look: &mut dyn FnMut(u64, u64),
) -> Result<Option<String>, Fault> {
    let url = client.url();
    let (sender, news) = sync_channel(4);
    let (asked, known) = (client.clone(), known.map(str::to_string));
    std::thread::spawn(move || {
        let end = ask(asked, known.as_deref(), &sender);
        let _ = sender.send(News::End(end));
    });
    let fault = |error: std::io::Error| Fault::passing(format!("{url}: {error}"));
    let part = path.with_file_name(".part");
    let (mut file, mut etag, mut total) = (None, String::new(), None);
    let (mut count, mut looked, mut heard) = (0, 0, Instant::now());
    loop {
        interrupt::check("downloading").map_err(|error| Fault::lasting(error.to_string()))?;
        let found = match news.recv_timeout(POLL) {
            Ok(found) => found,
            Err(RecvTimeoutError::Timeout) if heard.elapsed() < idle => continue,
            Err(_) => return Err(Fault::passing(format!("{url} has sent nothing for {} s", idle.as_secs()))),
        };
        heard = Instant::now();
        match found {
            News::Start(found, length) => {
                (etag, total) = (found, length);
                file = Some(File::create(&part).map_err(fault)?);
            }
            News::Part(bytes) => {
                let file = file.as_mut().expect("an answer begins before its bytes");
                file.write_all(&bytes).map_err(fault)?;
                count += bytes.len() as u64;
                if count >= looked + LOOK {
                    looked = count;
                    // Only the end is reported as the end.
                    look(count, total.unwrap_or(count + LOOK).max(count + 1));
                }
            }
            News::End(end) => match (end?, file.take()) {
                (true, Some(file)) => {
                    if total.is_some_and(|total| total != count) {
                        let total = total.unwrap_or_default();
                        return Err(Fault::passing(format!("{url} has sent {count} of {total} bytes")));
                    }
                    file.sync_all().map_err(fault)?;
                    std::fs::rename(&part, path).map_err(fault)?;
                    sync_parent(&RealFs, path).map_err(|error| Fault::lasting(error.to_string()))?;
                    look(count, count);
                    return Ok(Some(etag));
                }
                _ => return Ok(None),
            },
        }
    }
}

/// Requests the file and sends what the server sends. Returns false if the file still has the ETag `known`.
fn ask(mut client: Client, known: Option<&str>, news: &SyncSender<News>) -> Result<bool, Fault> {
    let lasting = |error: Error| Fault::lasting(error.to_string());
    let url = client.url().clone();
    for _ in 0..=MAX_REDIRECTS {
        let mut request = Request::get();
        if let Some(known) = known.filter(|known| !known.is_empty()) {
            request = request.header("If-None-Match", known);
        }
        let answer = client.send(request, TIMEOUT)?;
        let location = answer.header("location").filter(|_| matches!(answer.status(), 301 | 302 | 303 | 307 | 308));
        if let Some(location) = location {
            let next = client.url().redirect(location).map_err(lasting)?;
            expect_encrypted(client.url(), &next)?;
            drop(answer);
            client = client.at(next).map_err(lasting)?;
            continue;
        }
        return match answer.status() {
            304 => Ok(false),
            _ => send(answer, &url, news).map(|()| true),
        };
    }
    Err(Fault::lasting(format!("{url} redirects more than {MAX_REDIRECTS} times; name the last address")))
}

/// Errors if a redirect leaves an encrypted connection.
fn expect_encrypted(from: &Url, to: &Url) -> Result<(), Fault> {
    match from.is_https() && !to.is_https() {
        true => Err(Fault::lasting(format!(
            "{from} redirects to {to}, which is not encrypted; name an address of https:// that does not"
        ))),
        false => Ok(()),
    }
}

/// Sends the body of an answer.
fn send(answer: Answer, url: &Url, news: &SyncSender<News>) -> Result<(), Fault> {
    let answer = answer.success()?;
    let total = answer.header("content-length").and_then(|length| length.parse().ok());
    let etag = answer.header("etag").unwrap_or_default().to_string();
    let left = |_| Fault::lasting("the download was given up");
    news.send(News::Start(etag, total)).map_err(left)?;
    let (mut reader, mut buffer) = (answer.into_reader(), vec![0; 1 << 20]);
    loop {
        match reader.read(&mut buffer).map_err(|error| Fault::passing(format!("{url}: {error}")))? {
            0 => return Ok(()),
            read => news.send(News::Part(buffer[..read].to_vec())).map_err(left)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_http::testing::{Server, reply};
    use std::sync::atomic::{AtomicUsize, Ordering};

    static VERSION: AtomicUsize = AtomicUsize::new(1);

    #[test]
    fn a_server_that_sends_nothing_ends_the_attempt() {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = std::sync::Mutex::new(held);
        let server = Server::start(move |_, _| {
            let _ = held.lock().unwrap().recv();
            reply(200, "", "late")
        });
        let client = Client::new(Url::new("url", &server.url("/a?key=secret-key")).unwrap(), None, MAX_ANSWER).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let fault = fetch(&client, None, &folder.path().join("a"), POLL, &mut |_, _| {}).unwrap_err();
        drop(release);
        assert!(fault.may_pass && fault.words.contains("has sent nothing"), "{}", fault.words);
    }

    #[test]
    fn messages_have_no_keys_and_redirects_stay_encrypted() {
        let url = |text: &str| Url::new("url", text).unwrap();
        assert_eq!(redacted(&url("https://a/b?v=1&key=secret-key"), "no secret-key in 1"), "no … in 1");
        assert!(expect_encrypted(&url("https://a/b"), &url("http://a/b")).is_err());
        assert!(expect_encrypted(&url("https://a/b"), &url("https://c/b")).is_ok());
        assert!(expect_encrypted(&url("http://a/b"), &url("http://c/b")).is_ok());
    }

    #[test]
    fn a_file_is_copied_once_per_content_and_through_redirects() {
        let server = Server::start(|number, request| {
            let etag = format!("\"{}\"", VERSION.load(Ordering::Relaxed));
            match (number, request.target().1) {
                (0, _) => reply(503, "", "busy"),
                (_, "/old/train.jsonl?x=1") => reply(302, "Location: /new\r\n", ""),
                (_, "/new") if request.header("if-none-match") == Some(etag.as_str()) => reply(304, "", ""),
                (_, "/new") => reply(200, &format!("ETag: {etag}\r\n"), &format!("text {etag}")),
                _ => reply(404, "", "none"),
            }
        });
        let folder = tempfile::tempdir().unwrap();
        let url = server.url("/old/train.jsonl?x=1");
        let copy = || {
            let mut seen = (0, 0);
            let path = page("train_files", &url, folder.path(), &mut |done, total| seen = (done, total)).unwrap();
            assert_eq!(path.file_name().unwrap(), "train.jsonl");
            (std::fs::read_to_string(path).unwrap(), seen)
        };
        assert_eq!(copy(), ("text \"1\"".to_string(), (8, 8)));
        assert_eq!(copy(), ("text \"1\"".to_string(), (0, 0)));
        VERSION.store(2, Ordering::Relaxed);
        assert_eq!(copy().0, "text \"2\"");
        let error = |path: &str| page("train_files", &server.url(path), folder.path(), &mut |_, _| {}).unwrap_err();
        assert!(error("/absent.jsonl").to_string().contains("status 404"));
        assert!(matches!(error("/"), Error::Config(text) if text.contains("names no file")));
    }
}
