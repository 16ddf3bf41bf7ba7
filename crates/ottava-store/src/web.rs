//! Local copies of single files of web servers.

use crate::copies::lock;
use ottava_common::fs::{RealFs, replace_file, sync_parent};
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, interrupt};
use ottava_http::{Answer, Client, Fault, Request, Retry, Url};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// The maximum size of an answer that is an error, in bytes.
const MAX_ANSWER: u64 = 1 << 20;

/// The maximum number of redirects of a request.
const MAX_REDIRECTS: usize = 5;

/// The time limit of one attempt to download a file.
const TIMEOUT: Duration = Duration::from_secs(6 * 3600);

/// The number of bytes between two looks.
const LOOK: u64 = 8 << 20;

/// Returns the path of a copy of the file at the address `text` of the setting `setting`, in a subfolder of `folder`. A file that has changed on the
/// server is downloaded again, as far as the server names an ETag. Calls `look` with the bytes that are there and all bytes.
///
/// Errors with [`Error::Config`] if connections are forbidden, and with [`Error::External`] if the server fails or refuses.
pub fn page(setting: &str, text: &str, folder: &Path, look: &mut dyn FnMut(u64, u64)) -> Result<PathBuf> {
    let url = Url::new(setting, text)?;
    let name = url.as_str().split('?').next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    if name.is_empty() || !url.to_string()[url.origin().len()..].contains('/') || name.starts_with('.') {
        return Err(Error::Config(format!(
            "`{setting}` is {url}, which names no file; name a file, such as {url}/train.jsonl"
        )));
    }
    let folder = folder.join(&sha256(text.as_bytes())[..16]);
    let (path, etag) = (folder.join(name), folder.join(".etag"));
    let _lock = lock(&folder, &|| interrupt::check("waiting for another download of the same file"))?;
    let known = std::fs::read_to_string(&etag).ok().filter(|_| path.is_file());
    let retry = Retry { attempts: 6, first_pause: Duration::from_millis(300) };
    let pause = |time: Duration| {
        sleep(time);
        interrupt::check("waiting for a server").is_ok()
    };
    let fetched = retry.run(pause, || fetch(&url, known.as_deref(), &path, look)).map_err(|fault| {
        match interrupt::check("downloading") {
            Err(stop) => stop,
            Ok(()) => Error::External(fault.words),
        }
    })?;
    if let Some(found) = fetched {
        replace_file(&RealFs, &etag, found.as_bytes())?;
    }
    Ok(path)
}

/// Downloads a file to `path`, unless it still has the ETag `known`. Returns the ETag of a download, or an empty text.
fn fetch(url: &Url, known: Option<&str>, path: &Path, look: &mut dyn FnMut(u64, u64)) -> Result<Option<String>, Fault> {
    let lasting = |error: Error| Fault::lasting(error.to_string());
    let mut client = Client::new(url.clone(), None, MAX_ANSWER).map_err(lasting)?;
    for _ in 0..=MAX_REDIRECTS {
        let mut request = Request::get();
        if let Some(known) = known.filter(|known| !known.is_empty()) {
            request = request.header("If-None-Match", known);
        }
        let answer = client.send(request, TIMEOUT)?;
        let location = answer.header("location").filter(|_| matches!(answer.status(), 301 | 302 | 303 | 307 | 308));
        if let Some(location) = location {
            let next = client.url().redirect(location).map_err(lasting)?;
            drop(answer);
            client = client.at(next).map_err(lasting)?;
            continue;
        }
        if answer.status() == 304 {
            return Ok(None);
        }
        let etag = answer.header("etag").unwrap_or_default().to_string();
        write(answer, url, path, look)?;
        return Ok(Some(etag));
    }
    Err(Fault::lasting(format!("{url} redirects more than {MAX_REDIRECTS} times; name the last address")))
}

/// Writes the body of an answer to `path`. The file gets its name when it is whole.
fn write(answer: Answer, url: &Url, path: &Path, look: &mut dyn FnMut(u64, u64)) -> Result<(), Fault> {
    let answer = answer.success()?;
    let total: Option<u64> = answer.header("content-length").and_then(|length| length.parse().ok());
    let fault = |error: std::io::Error| Fault::passing(format!("{url}: {error}"));
    let part = path.with_file_name(".part");
    let mut file = File::create(&part).map_err(fault)?;
    let (mut reader, mut buffer, mut count, mut looked) = (answer.into_reader(), vec![0; 1 << 20], 0, 0);
    loop {
        interrupt::check("downloading").map_err(|error| Fault::lasting(error.to_string()))?;
        let read = reader.read(&mut buffer).map_err(fault)?;
        if read == 0 {
            break;
        }
        file.write_all(&buffer[..read]).map_err(fault)?;
        count += read as u64;
        if count >= looked + LOOK {
            looked = count;
            // Only the end is reported as the end.
            look(count, total.unwrap_or(count + LOOK).max(count + 1));
        }
    }
    if total.is_some_and(|total| total != count) {
        return Err(Fault::passing(format!("{url} has sent {count} of {} bytes", total.unwrap_or_default())));
    }
    file.sync_all().map_err(fault)?;
    std::fs::rename(&part, path).map_err(fault)?;
    sync_parent(&RealFs, path).map_err(|error| Fault::lasting(error.to_string()))?;
    look(count, count);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_http::testing::{Server, reply};
    use std::sync::atomic::{AtomicUsize, Ordering};

    static VERSION: AtomicUsize = AtomicUsize::new(1);

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
