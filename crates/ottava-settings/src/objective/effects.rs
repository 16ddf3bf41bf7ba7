//! Settings of objectives without effect, because of other settings.

use super::loss_type::LossType;
use crate::RunConfig;

impl RunConfig {
    /// Why no loss of the run reads the key at `path`, if only some losses read it.
    pub(crate) fn unread_by_losses(&self, path: &str) -> Option<String> {
        let (losses, key) = (self.preference.loss_type.as_ref()?, path.strip_prefix("preference.")?);
        let readers = |of: &[LossType]| -> Vec<&str> {
            of.iter().filter(|loss| loss.reads(key)).map(|loss| loss.as_str()).collect()
        };
        let (own, all) = (readers(losses.all()), readers(&LossType::ALL));
        let is_unread = own.is_empty() && !all.is_empty();
        is_unread.then(|| format!("with loss_type {}; it is for {}", losses.names(), all.join(", ")))
    }
}

/// Keys that only losses with a reference model read.
pub(crate) const OF_REFERENCE: &[&str] =
    &["preference.beta", "preference.reference_free", "preference.precompute_ref_log_probs"];
