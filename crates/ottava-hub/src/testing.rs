//! A server with the protocol of the Hub, for tests of clients. It serves repositories from memory, accepts uploads, and can fail on request.

mod faults;
mod store;

pub use faults::Faults;
pub use store::{Repo, Stored};

use ottava_http::escape;
use ottava_http::testing::{Received, Server, reply, reply_bytes};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use store::Store;

/// The server, and a second one, which stores the files of Git LFS.
pub struct FakeHub {
    server: Server,
    storage: Server,
    state: Arc<Mutex<State>>,
}

struct State {
    store: Store,
    faults: Faults,
    /// The addresses of the two servers, without a slash at the end.
    hub: String,
    storage: String,
    /// The number of signed addresses so far.
    signed: usize,
}

/// What the servers share.
type Shared = Arc<Mutex<State>>;

fn lock(state: &Shared) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeHub {
    /// Starts a server without repositories.
    pub fn start() -> FakeHub {
        let state = Arc::new(Mutex::new(State {
            store: Store::default(),
            faults: Faults::default(),
            hub: String::new(),
            storage: String::new(),
            signed: 0,
        }));
        let (of_hub, of_storage) = (state.clone(), state.clone());
        let server = Server::start(move |_, request| answer(&of_hub, request));
        let storage = Server::start(move |_, request| stored_answer(&of_storage, request));
        {
            let mut state = lock(&state);
            (state.hub, state.storage) = (server.url(""), storage.url(""));
        }
        FakeHub { server, storage, state }
    }

    /// Returns the address of the server.
    pub fn url(&self) -> String {
        self.server.url("")
    }

    /// Returns the requests to the server, and the requests to the server with the files of Git LFS.
    pub fn received(&self) -> (Vec<Received>, Vec<Received>) {
        (self.server.received(), self.storage.received())
    }

    /// Adds a commit with these files to a repository, such as `models/OWNER/NAME`. Files that end with `.safetensors`, `.bin` or `.parquet` are of
    /// Git LFS. Returns the commit.
    pub fn add(&self, repo: &str, files: &[(&str, &[u8])]) -> String {
        lock(&self.state).store.commit(repo, files)
    }

    /// Adds a commit with these files to another branch than `main`.
    pub fn add_branch(&self, repo: &str, branch: &str, files: &[(&str, &[u8])]) -> String {
        lock(&self.state).store.commit(&format!("{repo}@{branch}"), files)
    }

    /// Returns the files of the newest commit of a repository.
    pub fn files(&self, repo: &str) -> Vec<Stored> {
        lock(&self.state).store.repo(repo).map_or_else(Vec::new, |repo| repo.files.clone())
    }

    /// Changes how the server fails.
    pub fn fail(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut lock(&self.state).faults);
    }
}

fn error(status: u16, code: &str) -> Vec<u8> {
    reply(status, &format!("X-Error-Code: {code}\r\nX-Error-Message: {code}\r\n"), &json!({"error": code}).to_string())
}

fn json_reply(value: &Value) -> Vec<u8> {
    reply(200, "Content-Type: application/json\r\n", &value.to_string())
}

/// Answers a request to the Hub.
fn answer(state: &Shared, request: &Received) -> Vec<u8> {
    let (method, target) = request.target();
    let (path, _query) = target.split_once('?').unwrap_or((target, ""));
    let state = &mut *lock(state);
    if let Some(answer) = state.faults.busy() {
        return answer;
    }
    if let Some(answer) = state.faults.moved(target) {
        return answer;
    }
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match (method, &parts[..]) {
        ("POST", ["api", "repos", "create"]) => state.create(request),
        ("POST", ["api", "validate-yaml"]) => json_reply(&json!({"errors": [], "warnings": []})),
        ("GET", ["api", "whoami-v2"]) => json_reply(&json!({"name": "tester", "type": "user", "orgs": []})),
        (_, ["api", kind, owner, name, rest @ ..]) => {
            state.api(method, &format!("{kind}/{owner}/{name}"), rest, request)
        }
        (_, [owner, name, "info", "lfs", "objects", "batch"]) => {
            state.batch(&format!("models/{owner}/{}", name.trim_end_matches(".git")), request)
        }
        (_, ["datasets", owner, name, "info", "lfs", "objects", "batch"]) => {
            state.batch(&format!("datasets/{owner}/{}", name.trim_end_matches(".git")), request)
        }
        (_, ["datasets", owner, name, "resolve", rev, file @ ..]) => {
            state.resolve(method, &format!("datasets/{owner}/{name}"), rev, &file.join("/"), request)
        }
        (_, [owner, name, "resolve", rev, file @ ..]) => {
            state.resolve(method, &format!("models/{owner}/{name}"), rev, &file.join("/"), request)
        }
        _ => error(404, "NoSuchPath"),
    }
}

/// Answers a request to the server of files of Git LFS.
fn stored_answer(state: &Shared, request: &Received) -> Vec<u8> {
    let (method, target) = request.target();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let state = &mut *lock(state);
    let oid = path.trim_start_matches('/').to_string();
    let query = |name: &str| query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    match method {
        "PUT" => {
            if state.faults.takes(|faults| &mut faults.lost_uploads) {
                return reply(503, "", "busy");
            }
            if state.faults.takes(|faults| &mut faults.expired_uploads) {
                return reply(403, "", "expired");
            }
            let number = query("part").and_then(|part| part.parse().ok());
            state.store.upload(&oid, number, request.bytes.clone());
            reply(200, "ETag: \"part\"\r\n", "")
        }
        "POST" => match state.store.complete(&oid, &request.body) {
            true => reply(200, "", "{}"),
            false => reply(400, "", "wrong parts"),
        },
        _ => {
            let signature = query("signature").and_then(|number| number.parse::<usize>().ok());
            if signature.is_none() || state.faults.takes(|faults| &mut faults.expired) {
                return reply(403, "", "expired");
            }
            match state.store.lfs.get(&oid).cloned() {
                Some(bytes) => state.faults.send(method, &bytes, "", request.header("range")),
                None => error(404, "EntryNotFound"),
            }
        }
    }
}

impl State {
    fn api(&mut self, method: &str, repo: &str, rest: &[&str], request: &Received) -> Vec<u8> {
        if let Some(answer) = self.faults.refusal(repo, request) {
            return answer;
        }
        if self.store.repo(repo).is_none() {
            return error(404, "RepoNotFound");
        }
        match (method, rest) {
            ("GET", [] | ["revision", _]) => {
                let revision = rest.get(1).copied().unwrap_or("main").replace("%2F", "/");
                let Some((found, commit)) = self.store.at(repo, &revision) else {
                    return error(404, "RevisionNotFound");
                };
                let siblings: Vec<_> = found.files.iter().map(|file| json!({"rfilename": file.path})).collect();
                json_reply(
                    &json!({"id": repo.split_once('/').map(|(_, id)| id), "sha": commit, "private": found.private, "gated": false, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}),
                )
            }
            ("GET", ["tree", revision]) => {
                let Some((found, _)) = self.store.at(repo, revision) else { return error(404, "RevisionNotFound") };
                let files: Vec<Value> = found.files.iter().map(Stored::listed).collect();
                // Two files per page, so that every client must follow the pages.
                let target = request.target().1;
                let start: usize =
                    target.split("cursor=").nth(1).and_then(|rest| rest.split('&').next()?.parse().ok()).unwrap_or(0);
                let page: Vec<_> = files.iter().skip(start).take(2).collect();
                let host = if self.faults.foreign_pages { "https://huggingface.co" } else { &self.hub };
                let next = format!(
                    "Link: <{}/api/{repo}/tree/{revision}?recursive=true&cursor={}>; rel=\"next\"\r\n",
                    host,
                    start + 2
                );
                let headers = if start + 2 < files.len() { next.as_str() } else { "" };
                reply(200, headers, &json!(page).to_string())
            }
            ("POST", ["preupload", _]) => {
                let asked: Value = serde_json::from_slice(&request.bytes).unwrap_or_default();
                let forgotten = self.faults.forgotten.clone();
                let known = |file: &&Value| forgotten.is_none() || file["path"].as_str() != forgotten.as_deref();
                let answers: Vec<_> = asked["files"].as_array().into_iter().flatten().filter(known).map(|file| {
                    let path = file["path"].as_str().unwrap_or_default();
                    json!({"path": path, "uploadMode": if Stored::is_lfs(path) { "lfs" } else { "regular" }, "shouldIgnore": path.ends_with(".ignored"), "oid": null})
                }).collect();
                json_reply(&json!({"files": answers}))
            }
            ("POST", ["commit", _]) => match self.store.apply(repo, &request.body) {
                Ok(_) if self.faults.takes(|faults| &mut faults.lost_commits) => reply(503, "", "busy"),
                Ok(commit) => json_reply(
                    &json!({"success": true, "commitOid": commit, "commitUrl": format!("{}/{}/commit/{commit}", self.hub, repo.trim_start_matches("models/")), "hookOutput": ""}),
                ),
                Err(why) if why == store::MOVED => reply(412, "", &json!({"error": why}).to_string()),
                Err(why) => reply(400, "", &json!({"error": why}).to_string()),
            },
            _ => error(404, "NoSuchPath"),
        }
    }

    fn create(&mut self, request: &Received) -> Vec<u8> {
        let asked: Value = serde_json::from_slice(&request.bytes).unwrap_or_default();
        if request.header("authorization").is_none() {
            return error(401, "Unauthorized");
        }
        let kind = asked["type"].as_str().unwrap_or("model");
        let owner = asked["organization"].as_str().unwrap_or("tester");
        let repo = format!("{kind}s/{owner}/{}", asked["name"].as_str().unwrap_or_default());
        if self.store.repo(&repo).is_some() {
            return reply(409, "", &json!({"error": "You already created this repo"}).to_string());
        }
        if self.faults.forbids_creation {
            return reply(403, "", &json!({"error": "You may not create repositories"}).to_string());
        }
        self.store.commit(&repo, &[]);
        self.store.set_private(&repo, asked["private"] == true);
        json_reply(&json!({"url": format!("{}/{owner}/{}", self.hub, asked["name"].as_str().unwrap_or_default())}))
    }

    /// Answers with the addresses for uploads. Files of more than [`store::PART`] bytes are uploaded in parts if the client can do so.
    fn batch(&mut self, repo: &str, request: &Received) -> Vec<u8> {
        if self.store.repo(repo).is_none() {
            return error(404, "RepoNotFound");
        }
        let asked: Value = serde_json::from_slice(&request.bytes).unwrap_or_default();
        let has_parts = asked["transfers"].as_array().is_some_and(|transfers| transfers.contains(&json!("multipart")));
        let objects: Vec<Value> = asked["objects"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|object| {
                let (oid, size) =
                    (object["oid"].as_str().unwrap_or_default(), object["size"].as_u64().unwrap_or_default());
                let mut answer = json!({"oid": oid, "size": size});
                if !self.store.lfs.contains_key(oid) {
                    let url = format!("{}/{oid}", self.storage);
                    answer["actions"] = match has_parts && size > store::PART {
                        true => {
                            let mut header = json!({"chunk_size": store::PART.to_string()});
                            for part in 1..=size.div_ceil(store::PART) {
                                header[format!("{part:05}")] = json!(format!("{url}?part={part}"));
                            }
                            json!({"upload": {"href": format!("{url}?complete=1"), "header": header}})
                        }
                        false => json!({"upload": {"href": url}}),
                    };
                }
                answer
            })
            .collect();
        let transfer = if has_parts { "multipart" } else { "basic" };
        json_reply(&json!({"transfer": transfer, "objects": objects}))
    }

    fn resolve(&mut self, method: &str, repo: &str, revision: &str, path: &str, request: &Received) -> Vec<u8> {
        if let Some(answer) = self.faults.refusal(repo, request) {
            return answer;
        }
        if self.store.repo(repo).is_none() {
            return error(404, "RepoNotFound");
        }
        let Some((found, commit)) = self.store.at(repo, revision) else { return error(404, "RevisionNotFound") };
        let commit = commit.to_string();
        let Some(file) = found.files.iter().find(|file| escape(&file.path, "/") == path).cloned() else {
            return error(404, "EntryNotFound");
        };
        let mut headers = format!("X-Repo-Commit: {commit}\r\nAccept-Ranges: bytes\r\n");
        if file.sha256.is_none() {
            headers += &format!("ETag: \"{}\"\r\n", file.oid);
            return self.faults.send(method, &file.bytes, &headers, request.header("range"));
        }
        self.signed += 1;
        let (oid, size) = (file.sha256.as_deref().unwrap_or_default(), file.bytes.len());
        headers += &format!("X-Linked-ETag: \"{oid}\"\r\nX-Linked-Size: {size}\r\nETag: \"{oid}\"\r\n");
        headers += &format!("Location: {}/{oid}?signature={}\r\n", self.storage, self.signed);
        match method {
            "HEAD" => reply_bytes(302, &headers, b""),
            _ => reply(302, &headers, "moved"),
        }
    }
}
