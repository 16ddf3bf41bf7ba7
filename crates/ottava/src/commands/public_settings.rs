//! The settings of a run for other people: model cards and trackers. They have neither folders of the machine nor addresses of servers.

use ottava_hub::RepoId;
use ottava_settings::{RunConfig, SCHEMES, without_queries};
use std::path::{Path, PathBuf};

/// Returns all settings as keys and values. Files of the Hub have their names and commits, and other paths are shortened to file names. Addresses
/// have no host, and the store of checkpoints is left out.
pub fn public_settings(config: &RunConfig) -> Vec<(String, String)> {
    let mut config = config.clone();
    let name = |path: &Path| match RepoId::of_snapshot(path) {
        Some((id, commit)) => PathBuf::from(format!("{}@{commit}", id.name)),
        None => path.file_name().map(PathBuf::from).unwrap_or_default(),
    };
    let data = |path: &Path| match RepoId::of_snapshot(path) {
        Some((id, commit)) => {
            let inside = path.iter().skip_while(|part| *part != commit.as_str()).skip(1).collect::<PathBuf>();
            PathBuf::from(format!("hf://datasets/{}@{commit}/{}", id.name, inside.display()))
        }
        None => path.file_name().map(PathBuf::from).unwrap_or_default(),
    };
    for path in [
        &mut config.model.path,
        &mut config.model.tokenizer,
        &mut config.output_dir,
        &mut config.data.cache_dir,
        &mut config.data.chat.chat_template_path,
        &mut config.lora.init_from,
        &mut config.distillation.teacher,
        &mut config.distillation.logits,
    ] {
        *path = name(path);
    }
    let sets = config.data.datasets.iter_mut().flat_map(|set| [&mut set.train_files, &mut set.val_files]);
    for files in sets.chain([&mut config.data.train_files, &mut config.data.val_files]) {
        files.iter_mut().for_each(|path| *path = data(path));
    }
    config.checkpoint.upload_to.clear();
    config.settings().into_iter().map(|(key, value)| (key, without_folders(&without_queries(&value)))).collect()
}

/// The characters between words of a text in which paths and addresses are looked for.
const BREAKS: &[char] = &[' ', '\t', '\n', '\\', '"', '\'', ',', ';', '(', ')', '[', ']', '{', '}', '<', '>', '|'];

/// The characters between the paths of a word, such as `--data=PATH`.
const JOINTS: &[char] = &['=', '&'];

/// Shortens the paths in a text, such as the command of a reward, to file names: absolute paths, and relative paths that exist. Addresses keep their
/// scheme and path.
fn without_folders(value: &str) -> String {
    each_part(value, BREAKS, |word| match SCHEMES.iter().filter_map(|scheme| word.find(scheme)).min() {
        Some(at) => each_part(&word[..at], JOINTS, without_folder) + &without_host(&word[at..]),
        None => each_part(word, JOINTS, without_folder),
    })
}

/// Replaces the parts of a text between `ends`.
fn each_part(text: &str, ends: &[char], replace: impl Fn(&str) -> String) -> String {
    let parts = text.split_inclusive(ends).map(|part| {
        let word = part.trim_end_matches(ends);
        replace(word) + &part[word.len()..]
    });
    parts.collect()
}

/// Returns the scheme and the path of an address. Hosts, keys and parameters are left out.
fn without_host(address: &str) -> String {
    let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
    let path = rest.find('/').map_or("", |at| &rest[at..]);
    format!("{scheme}://HOST{}", path.split(['?', '#']).next().unwrap_or_default())
}

/// Returns the name of the file if the word is a path.
fn without_folder(word: &str) -> String {
    let is_marked = word.strip_prefix('/').is_some_and(|rest| rest.contains('/'))
        || ["~/", "./", "../"].iter().any(|start| word.starts_with(start));
    let is_path = word.contains('/') && (is_marked || Path::new(word).exists());
    match Path::new(word).file_name().filter(|_| is_path) {
        Some(name) => name.to_string_lossy().into_owned(),
        None => word.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_no_folders() {
        let value = r#"[{type = "regex", file = "/home/me/rules.txt"}, "https://example.org/score", "src/main.rs"]"#;
        let expected = r#"[{type = "regex", file = "rules.txt"}, "https://HOST/score", "main.rs"]"#;
        assert_eq!(without_folders(value), expected);
        let command =
            r#""python3 /home/me/score.py --data=/srv/x/y.jsonl --judge 'http://10.0.0.7:8000/v1?key=1' \"~/a/b\"""#;
        let expected = r#""python3 score.py --data=y.jsonl --judge 'http://HOST/v1' \"b\"""#;
        assert_eq!(without_folders(command), expected);
        // Words of texts are not paths.
        let text = r#""Answer yes/no. <think></think> /no_think hf://datasets/a/b@c/d.parquet a/b@c""#;
        assert_eq!(without_folders(text), text);
        let mut config = RunConfig::default();
        config.data.chat.chat_template_path = "/home/me/chat.jinja".into();
        config.checkpoint.upload_to = "s3://secret-bucket/runs".into();
        let settings = public_settings(&config);
        let template = settings.iter().find(|(key, _)| key.ends_with("chat_template_path"));
        assert_eq!(template.unwrap().1, "\"chat.jinja\"");
        assert!(settings.iter().all(|(_, value)| !value.contains("secret-bucket")));
    }
}
