//! Rotary positions that differ between the layers that see the whole context and the layers with a window.

use super::{NESTED, ORIGINAL, RopeScaling};
use crate::ConfigFile;
use ottava_common::error::Result;

/// Returns `file` without its rotary positions, for [`common`](crate::family::common), which can read only one kind for all layers.
pub(crate) fn without_ropes(file: &ConfigFile) -> ConfigFile {
    let mut others = file.values().clone();
    for key in ["rope_parameters", "rope_scaling", ORIGINAL] {
        others.remove(key);
    }
    file.with_values(others)
}

/// Returns the rotary positions of the layers that see the whole context, and of the layers with a window. Keys of `rope_scaling` apply to the
/// layers that see the whole context, in addition to the keys of `rope_parameters`. If `rope_parameters` is one object for all layers, it is ignored,
/// as in transformers.
///
/// `thetas` are the keys of the bases of both kinds of layers, and `others` is [`without_ropes`] of `file`.
pub(crate) fn by_layer_types(file: &ConfigFile, others: &ConfigFile, thetas: [&str; 2]) -> Result<Vec<RopeScaling>> {
    let [mut full, local] = match file.section("rope_parameters")? {
        Some(parameters) => [parameters.section(NESTED[0])?, parameters.section(NESTED[1])?],
        None => [None, None],
    };
    if let Some(scaling) = file.section("rope_scaling")? {
        let [had, has] = [full.as_ref(), Some(&scaling)].map(|section| section.map(stated_type).transpose());
        let (had, has) = (had?.flatten(), has?.flatten());
        let differ = had.as_deref().is_some_and(|had| had != "default" && has.as_deref().is_some_and(|has| has != had));
        let [theta, new_theta] =
            [full.as_ref(), Some(&scaling)].map(|section| section.and_then(|s| s.values().get("rope_theta")));
        if differ || (theta.is_some() && new_theta.is_some() && theta != new_theta) {
            return Err(
                file.error("`rope_scaling` and `rope_parameters` say different rotary positions; remove one of them")
            );
        }
        if has.is_some() && !scaling.has("rope_type") {
            return Err(scaling
                .error("the key `type` is not read for this model, neither by transformers; call it `rope_type`"));
        }
        let mut values = full.map(|full| full.values().clone()).unwrap_or_default();
        values.extend(scaling.values().clone());
        full = Some(scaling.with_values(values));
    }
    let of = |section: Option<ConfigFile>, theta: &str| {
        RopeScaling::of_section(others, section.as_ref(), file.required(theta)?)
    };
    Ok(vec![of(full, thetas[0])?, of(local, thetas[1])?])
}

/// Returns the type of rotary positions that a section names.
fn stated_type(section: &ConfigFile) -> Result<Option<String>> {
    section.optional("rope_type", section.optional("type", None)?)
}
