//! The Hub's server: its address, the token, and the questions about a repository.

use crate::cache::Cached;
use crate::entry::Entry;
use crate::id::is_commit;
use crate::{Pins, RepoId};
use ottava_common::{Error, Result, interrupt};
use ottava_http::{Answer, Client, Fault, Request, Retry, Secret, Url, escape, offline};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The address of the Hub.
const ENDPOINT: &str = "https://huggingface.co";

/// The maximum size of an answer of the API in bytes.
const MAX_ANSWER: u64 = 64 << 20;

/// The maximum number of pages of a listing.
const MAX_PAGES: usize = 10_000;

/// The maximum number of redirects of a request.
pub(crate) const MAX_REDIRECTS: usize = 5;

/// The time limit of a request to the API.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A server with the protocol of the Hugging Face Hub, and the cache of its files.
pub struct Hub {
    pub(crate) endpoint: Url,
    pub(crate) token: Option<Secret>,
    pub(crate) cache: PathBuf,
    /// What forbids connections.
    pub(crate) offline: Option<&'static str>,
    pub(crate) retry: Retry,
    pins: Mutex<Pins>,
    client: OnceLock<Client>,
    /// Clients of the servers that the Hub redirects to. Their connections are used again.
    others: Mutex<Vec<Client>>,
}

/// Why an answer of the API is missing.
pub(crate) enum Missing {
    /// The server was not reached, or failed.
    Fault(Fault),
    /// The server has refused the request, or the answer cannot be used.
    Refused(Error),
}

/// An answer of the API.
pub(crate) struct Page {
    pub(crate) bytes: Vec<u8>,
    /// The address of the next page, as the server writes it.
    next: Option<String>,
}

impl Hub {
    /// Reads the address, the token and the cache from the environment: `HF_ENDPOINT`; `HF_TOKEN`, `HF_TOKEN_PATH` or `HF_HOME/token`; `HF_HUB_CACHE`
    /// or `HF_HOME/hub`. `HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`, `OTTAVA_OFFLINE` and `--offline` forbid connections.
    ///
    /// Errors with [`Error::Config`] if the address is wrong, or if no folder for the cache is known.
    pub fn from_env() -> Result<Hub> {
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let folder = |name: &str| text(name).map(PathBuf::from);
        let home = folder("HF_HOME")
            .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| folder("HOME").map(|home| home.join(".cache/huggingface")));
        let cache = folder("HF_HUB_CACHE").or_else(|| home.as_ref().map(|home| home.join("hub")));
        let cache = cache.ok_or_else(|| {
            Error::Config("neither HF_HOME nor HOME is set; set HF_HOME to a folder for downloads".into())
        })?;
        let endpoint =
            Url::new("HF_ENDPOINT", text("HF_ENDPOINT").as_deref().unwrap_or(ENDPOINT).trim_end_matches('/'))?;
        let file = folder("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let from_file = || {
            let file = file?;
            Secret::from_text(&file.display().to_string(), &std::fs::read_to_string(&file).ok()?)
        };
        let token = text("HF_TOKEN").and_then(|value| Secret::from_text("HF_TOKEN", &value)).or_else(from_file);
        let token = token.filter(|_| !offline::is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN"));
        let variables = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"];
        let offline = offline::reason().or_else(|| variables.into_iter().find(|name| offline::is_set(name)));
        Ok(Hub { offline, ..Hub::new(endpoint, token, &cache) })
    }

    /// Creates the hub at `endpoint`, with its files in `cache`.
    pub fn new(endpoint: Url, token: Option<Secret>, cache: &Path) -> Hub {
        let retry = Retry { attempts: 5, first_pause: Duration::from_millis(300) };
        let (cache, client) = (cache.to_path_buf(), OnceLock::new());
        let (pins, others) = (Mutex::default(), Mutex::default());
        Hub { endpoint, token, cache, offline: None, retry, pins, client, others }
    }

    /// Returns this hub with another `retry`.
    pub fn with_retry(self, retry: Retry) -> Hub {
        Hub { retry, ..self }
    }

    /// Returns this hub without connections, because `reason` forbids them.
    pub fn without_network(self, reason: &'static str) -> Hub {
        Hub { offline: Some(reason), ..self }
    }

    /// Returns this hub with the commits of earlier questions, which are not asked for again.
    pub fn with_pins(self, pins: Pins) -> Hub {
        Hub { pins: Mutex::new(pins), ..self }
    }

    /// Returns the given commits, and the commits that were asked for.
    pub fn pins(&self) -> Pins {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records the commit of a name.
    pub(crate) fn pin(&self, id: &RepoId, commit: &str) {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner).set(id, commit);
    }

    pub(crate) fn cached(&self, id: &RepoId) -> Cached {
        Cached::new(&self.cache, id)
    }

    /// Returns the client of the server.
    pub(crate) fn client(&self) -> Result<&Client> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let client = Client::new(self.endpoint.clone(), self.token.clone(), MAX_ANSWER)?;
        Ok(self.client.get_or_init(|| client))
    }

    /// Returns the client of an address. All addresses of a server share connections; only addresses of the Hub get the token.
    pub(crate) fn client_at(&self, url: &Url) -> Result<Client> {
        let client = self.client()?;
        if client.url().origin() == url.origin() {
            return client.at(url.clone());
        }
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = others.iter().find(|known| known.url().origin() == url.origin()) {
            return known.at(url.clone());
        }
        let other = client.at(url.clone())?;
        others.push(other.clone());
        Ok(other)
    }

    /// Returns the address of the API of a repository.
    pub(crate) fn api(&self, id: &RepoId, path: &str) -> Url {
        self.endpoint.join(&format!("api/{}/{}/{path}", id.kind.plural(), id.name))
    }

    /// Returns the address of a file.
    pub(crate) fn file(&self, id: &RepoId, commit: &str, path: &str) -> Url {
        self.endpoint.join(&format!("{}{}/resolve/{commit}/{}", id.kind.prefix(), id.name, escape(path, "/")))
    }

    /// Asks for the commit of the revision of `id`.
    pub(crate) fn commit(&self, id: &RepoId) -> Result<String, Missing> {
        let page = self.get(id, self.api(id, &format!("revision/{}", escape(id.revision(), ""))))?;
        let info: Value = serde_json::from_slice(&page.bytes).unwrap_or_default();
        let commit = info["sha"].as_str().filter(|commit| is_commit(commit)).map(str::to_string);
        commit.ok_or_else(|| Missing::Refused(self.unusable(id, "it names no commit")))
    }

    /// Asks for all files of a commit.
    pub(crate) fn tree(&self, id: &RepoId, commit: &str) -> Result<Vec<Entry>, Missing> {
        let (mut entries, mut url) = (Vec::new(), self.api(id, &format!("tree/{commit}?recursive=true")));
        for _ in 0..MAX_PAGES {
            let page = self.get(id, url.clone())?;
            let listed: Value = serde_json::from_slice(&page.bytes).unwrap_or_default();
            let listed =
                listed.as_array().ok_or_else(|| Missing::Refused(self.unusable(id, "it is no list of files")))?;
            for file in listed.iter().filter(|file| file["type"] == "file") {
                let text = |value: &Value| value.as_str().map(str::to_string);
                let (lfs, path) = (&file["lfs"], file["path"].as_str().unwrap_or_default());
                let size = lfs["size"].as_u64().or(file["size"].as_u64()).unwrap_or_default();
                let entry = Entry::new(path, size, text(&file["oid"]).unwrap_or_default(), text(&lfs["oid"]));
                entries.push(entry.ok_or_else(|| {
                    Missing::Refused(self.unusable(id, &format!("its file {path:?} has an unusable path or checksum")))
                })?);
            }
            match page.next {
                Some(next) => url = self.next_page(id, &url, &next).map_err(Missing::Refused)?,
                None => return Ok(entries),
            }
        }
        Err(Missing::Refused(self.unusable(id, &format!("the list of its files has more than {MAX_PAGES} pages"))))
    }

    /// Returns the address of the page `next` of a listing. A mirror may send addresses of the original server; their path and query are asked of the
    /// mirror, because only the mirror has this listing and gets the token.
    fn next_page(&self, id: &RepoId, url: &Url, next: &str) -> Result<Url> {
        let found = url.redirect(next).map_err(|_| self.unusable(id, &format!("its next page is {next:?}")))?;
        if found.origin() == url.origin() {
            return Ok(found);
        }
        let path = found.as_str()[found.origin().len()..].trim_start_matches('/');
        Ok(self.endpoint.join(path))
    }

    /// Asks for a page of the API.
    fn get(&self, id: &RepoId, url: Url) -> Result<Page, Missing> {
        let read = |answer: Answer| {
            let codes = [answer.header("x-error-code"), answer.header("x-error-message")];
            let codes = codes.map(|text| text.unwrap_or_default().to_string());
            if let Some(error) = self.refusal(id, answer.status(), &codes) {
                return Ok(Err(error));
            }
            let next = answer.header("link").and_then(next_page).map(str::to_string);
            Ok(Ok(Page { bytes: answer.success()?.read()?, next }))
        };
        match self.retry.run(pause, || self.exchange(id, &url, TIMEOUT, Request::get, read)) {
            Ok(Ok(page)) => Ok(page),
            Ok(Err(error)) => Err(Missing::Refused(error)),
            Err(fault) => Err(Missing::Fault(fault)),
        }
    }

    /// Sends the request that `request` makes to `url`, an address of `id`, follows redirects of the same server with the same request, and returns
    /// what `read` makes of the answer.
    pub(crate) fn exchange<'a, T>(
        &self,
        id: &RepoId,
        url: &Url,
        timeout: Duration,
        request: impl Fn() -> Request<'a>,
        read: impl Fn(Answer) -> Result<Result<T>, Fault>,
    ) -> Result<Result<T>, Fault> {
        let mut url = url.clone();
        for _ in 0..MAX_REDIRECTS {
            let there = match self.client_at(&url) {
                Ok(there) => there,
                Err(error) => return Ok(Err(error)),
            };
            let answer = there.send(request(), timeout)?;
            let Some(location) = answer.header("location").filter(|_| (300..=399).contains(&answer.status())) else {
                return read(answer);
            };
            match url.redirect(location).ok().filter(|next| next.origin() == url.origin()) {
                Some(next) => url = next,
                None => {
                    return Ok(
                        Err(self.unusable(id, "it redirects to another server; set HF_ENDPOINT to that server")),
                    );
                }
            }
        }
        Ok(Err(self.unusable(id, "it redirects too often")))
    }

    /// Returns the error of an answer that says why a repository cannot be read; `None` for other answers.
    pub(crate) fn refusal(&self, id: &RepoId, status: u16, [code, words]: &[String; 2]) -> Option<Error> {
        let (kind, name, endpoint) = (id.kind.words(), &id.name, &self.endpoint);
        let token = match &self.token {
            Some(token) => format!("the token of {} may not read it", token.place()),
            None => "set HF_TOKEN to a token of an account that may read it".to_string(),
        };
        let page = format!("{endpoint}/{}{name}", id.kind.prefix());
        let text = match (code.as_str(), status) {
            ("GatedRepo", _) => format!("the {kind} {name} is gated: accept its conditions at {page}; {token}"),
            ("RevisionNotFound", _) => {
                format!(
                    "the {kind} {name} has no revision `{}`; {page} lists its branches, tags and commits",
                    id.revision()
                )
            }
            ("EntryNotFound", _) => format!("the {kind} {name} has no such file; {page} lists its files"),
            ("RepoNotFound", _) | (_, 401 | 404) => format!(
                "{endpoint} has no {kind} {name}, or it is private: check the spelling{}, or {token}{}",
                if name.contains('/') { "" } else { " (most names are OWNER/NAME)" },
                id.path_hint()
            ),
            (_, 403) => format!("{endpoint} refuses access to the {kind} {name}: {words}; {token}"),
            _ => return None,
        };
        Some(Error::Config(text))
    }

    /// Returns the error of an answer that makes no sense.
    pub(crate) fn unusable(&self, id: &RepoId, why: &str) -> Error {
        Error::External(format!("the answer of {} about {} cannot be used: {why}", self.endpoint, id.name))
    }
}

/// Waits before another attempt. Returns `false` if the process is asked to stop.
pub(crate) fn pause(time: Duration) -> bool {
    let end = Instant::now() + time;
    while Instant::now() < end {
        if interrupt::check("waiting for a server").is_err() {
            return false;
        }
        sleep(Duration::from_millis(20).min(time));
    }
    true
}

/// Returns the address of the next page in a header `Link`, which is a list of `<ADDRESS>; rel="NAME"`.
fn next_page(link: &str) -> Option<&str> {
    link.split('<').skip(1).find_map(|part| {
        let (address, parameters) = part.split_once('>')?;
        let is_next = |parameter: &str| {
            let value = parameter.trim().strip_prefix("rel=").unwrap_or_default();
            value.trim_matches('"').split(' ').any(|name| name == "next")
        };
        parameters.split([';', ',']).any(is_next).then_some(address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_to_a_server_share_its_connections() {
        let url = |text: &str| Url::new("url", text).unwrap();
        let secret = Secret::from_text("HF_TOKEN", "secret");
        let hub = Hub::new(url("http://127.0.0.1:1"), secret, Path::new("cache"));
        for text in
            ["http://127.0.0.1:2/a?signature=1", "http://127.0.0.1:2/b", "http://127.0.0.1:3/a", "http://127.0.0.1:1/x"]
        {
            assert_eq!(hub.client_at(&url(text)).unwrap().url().as_str(), text);
        }
        assert_eq!(hub.others.lock().unwrap().len(), 2);
    }

    #[test]
    fn pages_follow() {
        assert_eq!(next_page("<https://a/x?cursor=1>; rel=\"next\""), Some("https://a/x?cursor=1"));
        assert_eq!(next_page("<https://a/x>; rel=\"prev\""), None);
        assert_eq!(next_page("<https://a/x>; rel=prev, <https://a/y,z>; title=b; rel=next"), Some("https://a/y,z"));
    }
}
