//! The settings of a run for other people: model cards and trackers. They have no folders of the machine.

use ottava_hub::RepoId;
use ottava_settings::RunConfig;
use std::path::{Path, PathBuf};

/// Returns all settings as keys and values. Files of the Hub have their names and commits, and other paths are shortened to file names.
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
    config.settings().into_iter().map(|(key, value)| (key, without_folders(&value))).collect()
}

/// Shortens paths in the text of a value, such as the files of rewards, to file names: absolute paths, and relative paths that exist.
fn without_folders(value: &str) -> String {
    let shorten = |(at, part): (usize, &str)| {
        let is_path = part.contains('/') && (part.starts_with(['/', '~']) || Path::new(part).exists());
        match Path::new(part).file_name().filter(|_| at % 2 == 1 && is_path) {
            Some(name) => name.to_string_lossy().into_owned(),
            None => part.to_string(),
        }
    };
    // Every second part is between quotes.
    value.split('"').enumerate().map(shorten).collect::<Vec<_>>().join("\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_no_folders() {
        let value = r#"[{type = "regex", file = "/home/me/rules.txt"}, "https://example.org/score", "src/main.rs"]"#;
        let expected = r#"[{type = "regex", file = "rules.txt"}, "https://example.org/score", "main.rs"]"#;
        assert_eq!(without_folders(value), expected);
        let mut config = RunConfig::default();
        config.data.chat.chat_template_path = "/home/me/chat.jinja".into();
        let template = public_settings(&config).into_iter().find(|(key, _)| key.ends_with("chat_template_path"));
        assert_eq!(template.unwrap().1, "\"chat.jinja\"");
    }
}
