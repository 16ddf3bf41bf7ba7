//! Changes to the tokenizer of a model folder: more tokens, other special tokens, and a built-in chat template.
//!
//! The changed files are a folder of their own. So every reader of a tokenizer reads them like the files of any model, and checkpoints copy them.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use crate::added_tokens::NAMED;
use crate::built_in::BuiltInTemplate;
use crate::edges::read_json;
use crate::guard::catch_panics;
use crate::tokenizer::Tokenizer;
use ottava_common::hash::sha256;
use ottava_common::{Error, Result, input, python_json};

/// The maximum size of a copied file in bytes.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The files of a model folder that checkpoints copy unchanged: the files of the tokenizer, of the chat template and of other inputs.
pub const COMPANIONS: &[&str] = &[
    "tokenizer.json",
    CONFIG,
    MAP,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
];

/// The files of [`COMPANIONS`] that a changed `tokenizer.json` replaces. `tokenizer_config.json` has the tokens of `added_tokens.json`.
const REPLACED: [&str; 3] = ["tokenizer.json", "added_tokens.json", "tiktoken.model"];

/// The files beside these files that a tokenizer reads.
const READ: [&str; 2] = ["config.json", "generation_config.json"];

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";

/// The special tokens whose ids `config.json` and `generation_config.json` have, with the keys of these ids.
const IDS: [(&str, &str); 3] =
    [("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "pad_token_id")];

/// The folder of further chat templates.
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// Changes to a tokenizer.
#[derive(Clone, Copy, Debug)]
pub struct TokenizerChanges<'a> {
    /// Tokens to add. Text that has such a token becomes this token.
    pub added_tokens: &'a [String],
    /// Special tokens to add: decoded texts can leave them out.
    pub added_special_tokens: &'a [String],
    /// Names of special tokens, such as `eos_token`, with the tokens. Missing tokens are added.
    pub special_tokens: &'a [(String, String)],
    /// The chat template that replaces the template of the folder.
    pub chat_template: Option<&'static BuiltInTemplate>,
}

/// A folder with the files of a changed tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangedTokenizer {
    /// The folder.
    pub folder: PathBuf,
    /// The highest id plus 1.
    pub vocabulary: usize,
    /// The tokens that were added.
    pub new_tokens: Vec<String>,
    /// The keys of `config.json` for special tokens that changed, with their ids.
    pub ids: Vec<(&'static str, u32)>,
}

impl TokenizerChanges<'_> {
    /// Writes the changed files of `tokenizer`, a `tokenizer.json` or its folder, into a folder inside `below`. The name of the folder is a hash of the
    /// files, so equal changes share a folder, and ranks may write it at the same time.
    ///
    /// Errors with [`Error::Config`] for a token that cannot be added, an unknown name of a special token, or a chat template whose tokens the tokenizer
    /// lacks, and with the errors of [`Tokenizer::load`].
    pub fn write(&self, tokenizer: &Path, below: &Path) -> Result<ChangedTokenizer> {
        let tokenizer = Tokenizer::load(tokenizer)?;
        let source = tokenizer.path().to_path_buf();
        let folder = source.parent().unwrap_or(Path::new(".")).to_path_buf();
        let mut files = read_files(&folder)?;
        if self.chat_template.is_none() {
            files.extend(read_templates(&folder)?);
        }
        let roles = self.roles()?;
        let starts = tokenizer.start_ids().to_vec();
        let mut inner = tokenizer.into_inner();
        let added = self.added(&roles)?;
        let mut new_tokens: Vec<String> = Vec::new();
        for token in added.iter().map(|token| &token.content) {
            if inner.token_to_id(token).is_none() && !new_tokens.contains(token) {
                new_tokens.push(token.clone());
            }
        }
        if !added.is_empty() {
            let wrong = |reason| Error::Config(format!("[tokenizer]: tokens cannot be added: {reason}"));
            catch_panics(|| inner.add_tokens(added)).map_err(wrong)?;
        }
        let id_of = |token: &str| inner.token_to_id(token);
        self.expect_tokens_of_template(&source, &files, &roles, &id_of)?;

        let mut config = object(&folder.join(CONFIG))?;
        expect_start(&source, &config, &roles, &starts, &id_of)?;
        config.insert("added_tokens_decoder".into(), decoder(&inner));
        for (name, token) in &roles {
            config.insert(name.clone(), json!(token));
        }
        if let Some(template) = self.chat_template {
            config.shift_remove("chat_template");
            files.remove("chat_template.json");
            files.insert("chat_template.jinja".into(), template.text.as_bytes().to_vec());
        }
        files.insert(CONFIG.into(), as_json(config));
        if files.contains_key(MAP) {
            let mut map = object(&folder.join(MAP))?;
            roles.iter().for_each(|(name, token)| drop(map.insert(name.clone(), json!(token))));
            files.insert(MAP.into(), as_json(map));
        }
        let text = inner.to_string(true).map_err(|error| Error::Model(format!("{}: {error}", source.display())))?;
        files.insert("tokenizer.json".into(), text.into_bytes());

        let ids = IDS.iter().filter_map(|(name, key)| {
            let (_, token) = roles.iter().find(|(role, _)| role == name)?;
            Some((*key, id_of(token)?))
        });
        let ids = ids.collect();
        let highest = inner.get_vocab(true).into_values().max().unwrap_or_default();
        let folder = write_files(&files, below)?;
        Ok(ChangedTokenizer { folder, vocabulary: highest as usize + 1, new_tokens, ids })
    }

    /// Returns the special tokens that change, by name. A chat template brings the token that ends a turn, which ends a generated text.
    fn roles(&self) -> Result<Vec<(String, String)>> {
        if let Some((name, _)) = self.special_tokens.iter().find(|(name, _)| !NAMED.contains(&name.as_str())) {
            return Err(Error::Config(format!(
                "`tokenizer.special_tokens` has the name `{name}`; names are {}; list other special tokens in `tokenizer.added_special_tokens`",
                NAMED.join(", ")
            )));
        }
        let mut roles = self.special_tokens.to_vec();
        let end = self.chat_template.and_then(|template| template.end_of_turn);
        if let Some(end) = end.filter(|_| roles.iter().all(|(name, _)| name != "eos_token")) {
            roles.push(("eos_token".into(), end.into()));
        }
        Ok(roles)
    }

    /// Returns the tokens to add: plain tokens, special tokens, and the tokens of `roles` that the user chose.
    fn added(&self, roles: &[(String, String)]) -> Result<Vec<AddedToken>> {
        let chosen = roles.iter().take(self.special_tokens.len()).map(|(_, token)| token);
        let special = self.added_special_tokens.iter().chain(chosen).map(|token| (token, true));
        let all: Vec<_> = self.added_tokens.iter().map(|token| (token, false)).chain(special).collect();
        match all.iter().any(|(token, _)| token.is_empty()) {
            true => Err(Error::Config("[tokenizer] adds an empty token; remove it".into())),
            false => Ok(all.into_iter().map(|(token, special)| AddedToken::from(token.as_str(), special)).collect()),
        }
    }

    /// Errors if the tokenizer lacks a token of the chat template, or if the template ends turns with an end of text that no file names.
    fn expect_tokens_of_template(
        &self,
        source: &Path,
        files: &BTreeMap<String, Vec<u8>>,
        roles: &[(String, String)],
        id_of: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<()> {
        let Some(template) = self.chat_template else { return Ok(()) };
        let missing: Vec<String> =
            template.tokens.iter().filter(|token| id_of(token).is_none()).map(|token| format!("{token:?}")).collect();
        if !missing.is_empty() {
            return Err(Error::Config(format!(
                "`tokenizer.chat_template` is \"{}\", and {} has no token {}; write `added_special_tokens = [{}]` under [tokenizer] to add them",
                template.name,
                source.display(),
                missing.join(" or "),
                missing.join(", ")
            )));
        }
        let of_files =
            |name: &str| files.get(name).and_then(|bytes| python_json::parse(str::from_utf8(bytes).ok()?).ok());
        let names_end =
            [CONFIG, MAP].iter().any(|name| of_files(name).is_some_and(|file| !file["eos_token"].is_null()));
        let chosen = roles.iter().any(|(name, _)| name == "eos_token");
        match chosen || names_end {
            true => Ok(()),
            false => Err(Error::Config(format!(
                "`tokenizer.chat_template` is \"{}\", whose answers end with the end of a text, and no file beside {} names it; set \
                 `tokenizer.special_tokens = {{ eos_token = \"...\" }}`",
                template.name,
                source.display()
            ))),
        }
    }
}

/// Errors if the post-processor of the tokenizer writes `starts` before a text, and `roles` name another `bos_token`. transformers would write the old
/// token.
fn expect_start(
    source: &Path,
    config: &Map<String, Value>,
    roles: &[(String, String)],
    starts: &[u32],
    id_of: &dyn Fn(&str) -> Option<u32>,
) -> Result<()> {
    let Some((_, token)) = roles.iter().find(|(name, _)| name == "bos_token") else { return Ok(()) };
    let is_written = config.get("add_bos_token").is_some_and(Value::is_boolean);
    match is_written || starts.is_empty() || id_of(token).is_some_and(|id| starts.contains(&id)) {
        true => Ok(()),
        false => Err(Error::Config(format!(
            "`tokenizer.special_tokens` has the bos_token {token:?}, and the post-processor of {} writes other tokens before texts (ids {starts:?}); leave \
             bos_token out, or change `post_processor` in a copy of this file",
            source.display()
        ))),
    }
}

/// Reads the files of [`MORE_TEMPLATES`].
fn read_templates(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let (mut files, folder) = (BTreeMap::new(), folder.join(MORE_TEMPLATES));
    if !folder.is_dir() {
        return Ok(files);
    }
    for entry in std::fs::read_dir(&folder).map_err(Error::io(&folder))? {
        let path = entry.map_err(Error::io(&folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|name| name.ends_with(".jinja") && path.is_file()) {
            let bytes = input::read(&path, MAX_FILE_BYTES).map_err(Error::io(&path))?;
            files.insert(format!("{MORE_TEMPLATES}/{name}"), bytes);
        }
    }
    Ok(files)
}

/// Reads the files beside a `tokenizer.json` that are copied, if there are such files.
fn read_files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for name in COMPANIONS.iter().filter(|name| !REPLACED.contains(name)).chain(&READ) {
        let path = folder.join(name);
        if path.is_file() {
            files.insert(name.to_string(), input::read(&path, MAX_FILE_BYTES).map_err(Error::io(&path))?);
        }
    }
    Ok(files)
}

fn object(path: &Path) -> Result<Map<String, Value>> {
    Ok(read_json(path)?.as_object().cloned().unwrap_or_default())
}

fn as_json(object: Map<String, Value>) -> Vec<u8> {
    python_json::write(&object.into()).into_bytes()
}

/// Returns `added_tokens_decoder` of `tokenizer_config.json`: all added tokens by id.
fn decoder(tokenizer: &tokenizers::Tokenizer) -> Value {
    let all: BTreeMap<u32, AddedToken> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    let entry = |(id, token): (u32, AddedToken)| {
        let AddedToken { content, single_word, lstrip, rstrip, normalized, special } = token;
        let flags = json!({
            "content": content, "lstrip": lstrip, "normalized": normalized, "rstrip": rstrip, "single_word": single_word,
            "special": special,
        });
        (id.to_string(), flags)
    };
    Value::Object(all.into_iter().map(entry).collect())
}

/// Writes the files into a folder inside `below`, unless it exists.
fn write_files(files: &BTreeMap<String, Vec<u8>>, below: &Path) -> Result<PathBuf> {
    let names: Vec<_> = files.iter().map(|(name, bytes)| format!("{name} {}", sha256(bytes))).collect();
    let folder = below.join(format!("tokenizer-{}", &sha256(names.join("\n").as_bytes())[..16]));
    if folder.is_dir() {
        return Ok(folder);
    }
    // Processes of other machines, which may have the same number, write into the same folder.
    let partial = below.join(format!(".tokenizer-{:016x}", RandomState::new().hash_one(std::process::id())));
    let written =
        write_all(files, &partial).and_then(|()| std::fs::rename(&partial, &folder).map_err(Error::io(&folder)));
    if written.is_err() {
        let _ = std::fs::remove_dir_all(&partial);
    }
    match written {
        // Another rank may have written the same folder meanwhile.
        Err(error) if !folder.is_dir() => Err(error),
        Ok(()) | Err(_) => Ok(folder),
    }
}

/// Writes the files into the new folder `folder`.
fn write_all(files: &BTreeMap<String, Vec<u8>>, folder: &Path) -> Result<()> {
    for (name, bytes) in files {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent).map_err(Error::io(parent))?;
        std::fs::write(&path, bytes).map_err(Error::io(&path))?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "tokenizer_changes_tests.rs"]
mod tests;
